"""Brings a database's tables to what this code needs. The steps themselves are in alembic/versions."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, insert, inspect, make_url, text

from app.storage.database import Database
from app.storage.tables import Base

if TYPE_CHECKING:
    from alembic.config import Config

_APP = Path(__file__).resolve().parents[1]
_ALEMBIC = _APP / "alembic" if (_APP / "alembic").is_dir() else _APP.parent / "alembic"
"""Inside the package if it was installed from a wheel (setup.py), next to it in a checkout."""


def migrate(url: str) -> None:
    """Brings the database to the newest revision; processes that start together do it one after another.

    An empty SQLite database gets the newest tables at once, and a database at the newest revision is left
    unchanged: both start the service faster, without importing Alembic.
    """
    database = Database(url)
    try:
        with _one_at_a_time(url):
            if database.is_sqlite and not inspect(database.engine).get_table_names():
                _create_newest(database)
            elif current_revision(database) != newest_revision():
                _run_alembic(url, "head")
            _restrict_to_owner(url)
    finally:
        database.close()


def upgrade(url: str, revision: str = "head") -> None:
    """Runs the migrations up to a revision, without checking first whether any is needed."""
    with _one_at_a_time(url):
        _run_alembic(url, revision)
        _restrict_to_owner(url)


def alembic_config(url: str) -> "Config":
    """Alembic's configuration: the folder of the migrations and the URL of the database."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_ALEMBIC))
    config.attributes["url"] = url
    return config


def current_revision(database: Database) -> str | None:
    """The database's revision, or None if it was never migrated."""
    with database.engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision


def newest_revision() -> str:
    """The newest revision in this code: the highest number at the start of a migration's file name."""
    return max(path.name.partition("_")[0] for path in (_ALEMBIC / "versions").glob("[0-9]*_*.py"))


_ALEMBIC_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32)),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""The table in which Alembic records the revision, as Alembic itself creates it."""


def _create_newest(database: Database) -> None:
    """Creates the tables that all migrations together would create, and records the newest revision."""
    with database.writing() as session:
        connection = session.connection()
        Base.metadata.create_all(connection, checkfirst=False)  # the database is empty
        _ALEMBIC_VERSION.create(connection)
        connection.execute(insert(_ALEMBIC_VERSION).values(version_num=newest_revision()))


def _run_alembic(url: str, revision: str) -> None:
    from alembic import command

    command.upgrade(alembic_config(url), revision)


@contextmanager
def _one_at_a_time(url: str) -> Iterator[None]:
    """A lock beside a SQLite file; on PostgreSQL the migration takes an advisory lock itself."""
    path = make_url(url).database
    if not url.startswith("sqlite") or not path or path == ":memory:":
        yield
        return
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Path(f"{path}.migrating").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _restrict_to_owner(url: str) -> None:
    path = make_url(url).database
    if url.startswith("sqlite") and path and Path(path).exists():
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # noqa: PTH101
