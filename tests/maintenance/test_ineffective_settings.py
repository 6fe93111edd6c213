"""Settings without effect are reported: misspelled ones, and those in the wrong place."""

from pathlib import Path

import pytest

from app.maintenance.ineffective_settings import ineffective_settings, misspelled, only_in_file


def test_a_name_that_resembles_a_setting_is_reported() -> None:
    (message,) = misspelled(["ACCRUE_MAX_FILES_BYTES", "ACCRUE_PORT", "accrue_host", "PATH", "ACCRUE_URL"])
    assert message == (
        "ACCRUE_MAX_FILES_BYTES is not a setting, and has no effect: did you mean ACCRUE_MAX_FILE_BYTES?"
    )


def test_variables_of_accrue_s_own_processes_are_not_settings() -> None:
    assert not [*misspelled(["ACCRUE_PART", "ACCRUE_PARENT_FD", "ACCRUE_FAIL_POINTS", "ACCRUE_API_KEY"])]


def test_a_line_of_the_env_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("ACCRUE_OFLINE=true\n")
    monkeypatch.chdir(tmp_path)
    assert any("did you mean ACCRUE_OFFLINE?" in message for message in ineffective_settings())


def test_a_line_that_only_has_an_effect_in_the_environment_is_reported() -> None:
    lines = ["CUDA_VISIBLE_DEVICES", "ACCRUE_PORT", "HF_TOKEN", "https_proxy", "OTHER"]
    assert [message.split(" has no effect in .env")[0] for message in only_in_file(lines, {"HF_TOKEN"})] == [
        "CUDA_VISIBLE_DEVICES", "https_proxy",
    ]  # fmt: skip
