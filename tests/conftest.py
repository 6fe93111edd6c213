"""What every test may ask for: settings in a folder of its own, and a migrated database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.database import Database, migrate
from app.logs import configure
from app.settings import Settings

configure("INFO", "json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes (make test-slow)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what takes minutes, saying so."""
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-slow"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        data_dir=tmp_path / "data",
        models_dir=tmp_path / "models",
        offline=True,
        profiler=False,
        _env_file=None,
    )
    settings.make_directories()
    return settings


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """Built by the migrations, as in real life."""
    migrate(settings.url)
    database = Database(settings.url)
    yield database
    database.close()
