from pathlib import Path

import pytest

from app.errors import BadSetting
from app.settings import Settings, get_settings

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("document", [".env.example", "docs/configuration.md"])
def test_every_setting_is_documented(document: str) -> None:
    text = (ROOT / document).read_text()
    missing = [name for name in Settings.model_fields if f"ACCRUE_{name.upper()}" not in text]
    assert missing == []


def test_an_invalid_setting_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCRUE_GPUS", "24GB,toaster")
    get_settings.cache_clear()
    with pytest.raises(BadSetting, match=r"ACCRUE_GPUS: .*toaster"):
        get_settings()
    get_settings.cache_clear()


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(data_dir=Path("here"), _env_file=None)
    assert settings.files_dir == tmp_path / "here" / "files"
    assert settings.resolved_database_url == f"sqlite:///{tmp_path}/here/accrue.db"
