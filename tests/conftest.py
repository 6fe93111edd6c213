"""Fixtures for all tests: settings with a folder of their own, and a migrated database.

The service's packages are imported where a test asks for them, since tests/gpu also run where only the
trainer's are installed.
"""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from app.settings import Settings
    from app.storage.database import Database
    from tests.harness.postgresql import Server

if find_spec("structlog"):
    from app.logs import configure

    configure("INFO", "json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes (make test-slow)")
    parser.addoption("--faults", action="store_true", help="also every fault (make test-faults)")
    parser.addoption("--postgresql", action="store_true", help="on a PostgreSQL server instead of SQLite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what takes minutes, and what is about another database, saying so."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-slow"))
        if item.get_closest_marker("faults") and not config.getoption("--faults"):
            item.add_marker(pytest.mark.skip(reason="one of many faults: make test-faults"))
        if item.get_closest_marker("sqlite") and config.getoption("--postgresql"):
            item.add_marker(pytest.mark.skip(reason="about SQLite"))
        elif config.getoption("--postgresql") and not _DATABASES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="needs no database: make test runs it"))
        if item.get_closest_marker("postgresql") and not config.getoption("--postgresql"):
            item.add_marker(pytest.mark.skip(reason="about PostgreSQL: pytest --postgresql"))


_DATABASES = {"server", "database_url"}
"""Fixtures on which every test with a database depends."""


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Server | None]":
    """The PostgreSQL server, where the tests run on one."""
    if not request.config.getoption("--postgresql"):
        yield None
        return
    from tests.harness.postgresql import Server

    server = Server(tmp_path_factory.mktemp("pg"))
    yield server
    server.stop()


@pytest.fixture
def database_url(server: "Server | None") -> Iterator[str | None]:
    """A database of the test's own; null: SQLite in its data folder."""
    if server is None:
        yield None
        return
    url = server.new_database()
    yield url
    server.drop(url)


@pytest.fixture
def settings(tmp_path: Path, database_url: str | None) -> "Settings":
    from app.settings import Settings

    settings = Settings(
        database_url=database_url,
        data_dir=tmp_path / "data",
        models_dir=tmp_path / "models",
        offline=True,
        profiler=False,
        _env_file=None,
    )
    settings.make_directories()
    return settings


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database as all migrations make it, to be copied: that takes a hundredth of the time."""
    from app.storage.migrations import migrate, upgrade

    path = tmp_path_factory.mktemp("migrated") / "accrue.db"
    upgrade(f"sqlite:///{path}")
    migrate(f"sqlite:///{path}")  # opens it as the service does, which turns on the write-ahead log
    return path


@pytest.fixture
def migrated(settings: "Settings", migrated_file: Path) -> None:
    """The settings' database has all tables. Copied once for each test: a second copy would replace the file
    that the application has open, which then reads an empty database at times."""
    if settings.database_url is None:
        shutil.copy(migrated_file, settings.data_dir / migrated_file.name)


@pytest.fixture
def database(settings: "Settings", migrated: None) -> "Iterator[Database]":
    from app.storage.database import Database

    database = Database(settings.resolved_database_url)
    yield database
    database.close()


@pytest.fixture
def client(settings: "Settings", migrated: None) -> "Iterator[TestClient]":
    """The application in this process, with a database of its own and no worker."""
    from fastapi.testclient import TestClient

    from app.main import create_app

    declared = settings.model_copy(update={"gpus": "24GB,24GB,24GB,24GB"})
    with TestClient(create_app(declared), base_url="http://127.0.0.1:8000") as client:
        yield client
