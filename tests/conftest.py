"""What every test may ask for: settings in a folder of its own, and a migrated database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.database import Database, migrate
from app.logs import configure
from app.settings import Settings

configure("INFO", "json")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(
        data_dir=tmp_path / "data", models_dir=tmp_path / "models", offline=True, _env_file=None
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
