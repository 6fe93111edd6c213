"""The address that `accrue up` and `accrue serve` listen on."""

import os
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.service import commands
from app.runtime import processes
from app.settings import get_settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("127.0.0.1", 8001)),
        (["--port", "8123"], ("127.0.0.1", 8123)),
        (["--host", "::1"], ("::1", 8001)),
    ],
)
def test_options_replace_the_settings(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: tuple[str, int]
) -> None:
    """They reach the processes that `up` starts as variables."""
    monkeypatch.setenv("ACCRUE_HOST", "127.0.0.1")
    monkeypatch.setenv("ACCRUE_PORT", "8001")
    checked: list[Any] = []
    monkeypatch.setattr(processes, "check_port", lambda *address: checked.append(address))
    monkeypatch.setattr(processes, "up", lambda: 0)
    get_settings.cache_clear()
    try:
        done = CliRunner().invoke(commands, ["up", *arguments])
    finally:
        get_settings.cache_clear()
    assert done.exit_code == 0, done.output
    assert checked == [expected]
    assert (os.environ["ACCRUE_HOST"], os.environ["ACCRUE_PORT"]) == (expected[0], str(expected[1]))


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_an_impossible_port_is_refused(port: str) -> None:
    done = CliRunner().invoke(commands, ["serve", "--port", port])
    assert done.exit_code == 2
    assert "--port" in done.output
