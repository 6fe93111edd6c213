import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import inspect, select, text
from sqlalchemy.exc import IntegrityError

from app.database import Database, current_revision, database_now, head_revision, migrate
from app.models import Attempt, Base, Configuration
from app.settings import Settings


def test_the_migrations_make_what_the_models_say(database: Database) -> None:
    tables = inspect(database.engine)
    assert set(tables.get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    for name, table in Base.metadata.tables.items():
        assert {column["name"] for column in tables.get_columns(name)} == set(table.columns.keys())
        nullable = {column["name"]: column["nullable"] for column in tables.get_columns(name)}
        assert nullable == {column.name: column.nullable for column in table.columns}
        assert {index["name"] for index in tables.get_indexes(name)} == {
            index.name for index in table.indexes
        }


def test_several_processes_may_migrate_together(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(migrate, [url] * 4))
    database = Database(url)
    assert current_revision(database) == head_revision()
    database.close()


def test_the_database_is_its_owner_s_alone(database: Database, settings: Settings) -> None:
    assert settings.data_dir.stat().st_mode & 0o077 == 0
    assert (settings.data_dir / "accrue.db").stat().st_mode & 0o077 == 0


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


def test_what_raises_is_rolled_back_and_references_are_kept(database: Database) -> None:
    def add_one_good_and_one_bad() -> None:
        with database.writing() as session:
            session.add(Configuration(id="accumulation_1", created_at=0.0, given={}, num_gpus=1))
            session.flush()
            session.add(Attempt(job_id="ftjob-none", attempt=1, worker_id="w", claimed_at=0.0))

    with pytest.raises(IntegrityError):
        add_one_good_and_one_bad()
    with database.reading() as session:
        assert session.scalars(select(Configuration)).all() == []
