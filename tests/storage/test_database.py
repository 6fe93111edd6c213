import contextlib
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, MetaData, String, Table, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, OperationalError

from app.settings import Settings
from app.storage import migrations
from app.storage.compiled import CompiledStatement
from app.storage.database import Database, database_now, is_unavailable
from app.storage.migrations import alembic_config, current_revision, migrate, newest_revision, upgrade
from app.storage.tables import Attempt, Base, Configuration, Job
from tests.harness.postgresql import Server
from tests.harness.runs import until
from tests.harness.submissions import submitted


def test_the_migrations_create_the_columns_and_indexes_of_the_models(database: Database) -> None:
    tables = inspect(database.engine)
    assert set(tables.get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    for name, table in Base.metadata.tables.items():
        assert {column["name"] for column in tables.get_columns(name)} == set(table.columns.keys())
        nullable = {column["name"]: column["nullable"] for column in tables.get_columns(name)}
        assert nullable == {column.name: column.nullable for column in table.columns}
        indexes = [index for index in tables.get_indexes(name) if not index.get("duplicates_constraint")]
        assert {index["name"] for index in indexes} == {index.name for index in table.indexes}


@pytest.mark.sqlite
def test_the_migrations_make_exactly_the_tables_of_the_models(tmp_path: Path) -> None:
    """Types, keys and references, too; `migrate` gives an empty database those of the models."""
    migrated, created = (Database(f"sqlite:///{tmp_path / name}.db") for name in ("migrated", "created"))
    upgrade(migrated.url)
    migrate(created.url)
    assert structure(migrated) == structure(created)
    assert current_revision(migrated) == current_revision(created) == newest_revision()
    migrated.close()
    created.close()


@pytest.mark.sqlite
def test_a_database_is_created_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    database = Database(url)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "newest_revision", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            migrate(url)
    assert inspect(database.engine).get_table_names() == []
    migrate(url)
    assert current_revision(database) == newest_revision()
    database.close()


def structure(database: Database) -> dict[str, Any]:
    """What SQLite says of every table, whatever the order of its columns."""
    described: dict[str, Any] = {}
    with database.engine.connect() as connection:

        def ask(pragma: str, name: str) -> list[Any]:
            return [tuple(row)[1:] for row in connection.execute(text(f"PRAGMA {pragma}('{name}')"))]

        tables = "SELECT name, wr FROM pragma_table_list WHERE schema = 'main'"
        for name, is_without_rowid in connection.execute(text(tables)).all():
            columns = {
                (column, kind.replace("VARCHAR", "TEXT"), *rest)
                for column, kind, *rest in ask("table_xinfo", name)
            }
            indexes = {
                index: (rest, [column for _, column in ask("index_info", index)])
                for index, *rest in ask("index_list", name)
            }
            described[name] = (is_without_rowid, columns, indexes, set(ask("foreign_key_list", name)))
    return described


def unmigrated(folder: Path, server: Server | None) -> str:
    """The URL of a database without tables."""
    return f"sqlite:///{folder / 'x.db'}" if server is None else server.new_database(migrated=False)


def test_several_processes_may_migrate_together(tmp_path: Path, server: Server | None) -> None:
    url = unmigrated(tmp_path, server)
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(migrate, [url] * 4))
    database = Database(url)
    assert current_revision(database) == newest_revision()
    database.close()


@pytest.mark.sqlite
def test_only_the_owner_can_access_the_database_file(database: Database, settings: Settings) -> None:
    assert settings.data_dir.stat().st_mode & 0o077 == 0
    assert (settings.data_dir / "accrue.db").stat().st_mode & 0o077 == 0


@pytest.mark.sqlite
def test_the_pragmas(database: Database) -> None:
    with database.engine.connect() as connection:
        found = {
            p: connection.execute(text(f"PRAGMA {p}")).scalar()
            for p in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_the_database_s_clock_is_unix_time(database: Database) -> None:
    with database.reading() as session:
        assert session.scalar(select(database_now())) == pytest.approx(time.time(), abs=2)


def test_failed_transactions_are_rolled_back_and_foreign_keys_are_enforced(database: Database) -> None:
    def add_one_good_and_one_bad() -> None:
        with database.writing() as session:
            session.add(Configuration(id="accumulation_1", created_at=0.0, given={}, num_gpus=1))
            session.flush()
            session.add(Attempt(job_id="ftjob-none", attempt=1, worker_id="w", claimed_at=0.0))

    with pytest.raises(IntegrityError):
        add_one_good_and_one_bad()
    with database.reading() as session:
        assert session.scalars(select(Configuration)).all() == []


def test_data_of_the_first_release_can_be_upgraded_and_downgraded(
    tmp_path: Path, server: Server | None
) -> None:
    from alembic import command

    url = unmigrated(tmp_path, server)
    upgrade(url, "0001")
    database = Database(url)
    fill(database)
    before = content(database)
    assert sum(map(len, before.values())) >= 7
    migrate(url)
    after = content(database)
    assert {name: shared(rows, before[name]) for name, rows in after.items() if name in before} == before
    command.downgrade(alembic_config(url), "0001")
    assert content(database) == before
    database.close()


def fill(database: Database) -> None:
    """Inserts a row into every table, and jobs of different priorities, by the columns that exist now."""
    tables = MetaData()
    tables.reflect(database.engine)
    with database.writing() as session:
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                session.execute(table.insert().values({c.name: value_for(c, 0) for c in table.columns}))
        jobs = tables.tables["jobs"]
        other = {c.name: value_for(c, 0) for c in jobs.columns} | {"id": "another", "priority": 7}
        session.execute(jobs.insert().values(other))


def value_for(column: Any, number: int) -> Any:
    """Something that the column takes; ids are all the same, so that references hold."""
    if isinstance(column.type, JSON):
        return {"some": ["thing", number]}
    if isinstance(column.type, String):
        return "one"
    return column.type.python_type(1)


def content(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table."""
    tables = MetaData()
    with database.engine.connect() as connection:
        tables.reflect(connection)
        return {
            table.name: [
                dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
            ]
            for table in tables.sorted_tables
            if table.name != "alembic_version"
        }


def in_order(table: Table) -> Any:
    return select(table).order_by(*table.primary_key)


def shared(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the columns that came later, and by their earlier names."""
    names = set(earlier[0]) if earlier else set()
    by_first_name = [{_FIRST_NAMES.get(name, name): value for name, value in row.items()} for row in rows]
    return [{name: value for name, value in row.items() if name in names} for row in by_first_name]


_FIRST_NAMES = {"client_metadata": "labels"}
"""Columns that were renamed since the first release."""


def test_a_migration_that_is_killed_is_done_by_the_next_process(
    tmp_path: Path, server: Server | None
) -> None:
    for reached in ("0001", "0005", "0009", "0013"):
        (tmp_path / reached).mkdir()
        url = unmigrated(tmp_path / reached, server)
        database = Database(url)
        script = f"from app.storage.migrations import upgrade; upgrade({url!r})"
        process = subprocess.Popen([sys.executable, "-c", script])
        until(lambda: (current_revision(database) or "") >= reached, 30)  # noqa: B023  # called at once
        process.kill()
        process.wait()
        migrate(url)
        assert current_revision(database) == newest_revision()
        assert set(inspect(database.engine).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
        database.close()


@pytest.mark.postgresql
def test_connections_are_restored_after_a_server_restart(database: Database, server: Server) -> None:
    with database.reading() as session:
        session.scalar(select(database_now()))
    server.restart()
    with database.writing() as session:
        session.add(Configuration(id="accumulation_1", created_at=0.0, given={}, num_gpus=1))
    with database.reading() as session:
        assert session.get(Configuration, "accumulation_1") is not None


@pytest.mark.postgresql
def test_a_suspended_process_does_not_keep_its_locks(database: Database) -> None:
    job_id = submitted(database)
    lock = select(Job.id).where(Job.id == job_id).with_for_update(skip_locked=True)
    suspended = Database(database.url, idle_seconds=0.5)

    def is_free() -> bool:
        with database.writing() as session:
            return session.scalar(lock) is not None

    with suspended.engine.connect() as connection:
        assert connection.scalar(lock) == job_id
        assert not is_free()
        until(is_free, 20)
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("SELECT 1"))
        assert is_unavailable(caught.value)
    suspended.close()


@pytest.mark.sqlite
def test_errors_that_waiting_cannot_fix_are_raised_at_once(database: Database, settings: Settings) -> None:
    readonly = Database(f"sqlite:///file:{settings.data_dir / 'accrue.db'}?mode=ro&uri=true")
    began = time.monotonic()
    with pytest.raises(OperationalError, match="readonly"), readonly.writing() as session:
        session.add(Configuration(id="accumulation_1", created_at=0.0, given={}, num_gpus=1))
    assert time.monotonic() - began < 5
    readonly.close()


def test_using_a_session_after_its_block_raises(database: Database) -> None:
    for opened in (database.reading, database.writing):
        with opened() as session:
            session.execute(text("SELECT 1"))
        with pytest.raises(InvalidRequestError, match="permanently closed"):
            session.execute(text("SELECT 1"))
    with database.transaction() as transaction, database.within(transaction).writing() as session:
        session.execute(text("SELECT 1"))
    with pytest.raises(InvalidRequestError, match="permanently closed"):
        session.execute(text("SELECT 1"))


@pytest.mark.sqlite
def test_a_filled_pool_opens_no_file_later(database: Database) -> None:
    database.fill_pool()
    before = open_files()
    with contextlib.ExitStack() as readers:
        for _ in range(5):
            readers.enter_context(database.reading()).execute(text("SELECT 1 FROM jobs"))
        assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_prepared_statement_s_errors_are_sqlalchemy_s(database: Database) -> None:
    attempt = CompiledStatement(lambda dialect: insert(Attempt), Attempt.__table__.columns.keys())
    row = {"job_id": "ftjob-none", "attempt": 1, "worker_id": "w", "claimed_at": 0.0}
    missing = {"ended_at": None, "plan": None, "outcome": None}

    def add() -> None:
        with database.writing() as session:
            attempt.run(session, row | missing)

    with pytest.raises(IntegrityError):
        add()


@pytest.mark.sqlite
def test_the_write_ahead_log_is_restarted_instead_of_growing(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = settings.data_dir / "accrue.db-wal"

    def grown(commits: int) -> int:
        before = log.stat().st_size if log.exists() else 0
        for number in range(commits):
            with database.writing() as session:
                name = f"accumulation_{commits}_{number}"
                session.add(Configuration(id=name, created_at=0.0, given={"x": "y" * 3000}, num_gpus=1))
        return log.stat().st_size - before

    freely = grown(100)
    monkeypatch.setattr("app.storage.database._COMMITS_BETWEEN_RESTARTS", 10)
    assert grown(200) < freely / 4
