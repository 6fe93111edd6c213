"""What `accrue up` and `accrue serve` do before they listen."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.service import commands
from app.runtime import processes
from app.settings import get_settings
from tests.harness.service import free_port


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


def serving(**environment: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, **environment}
    command = [sys.executable, "-m", "app.cli", "serve"]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)


def test_a_port_in_use_ends_the_service_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = serving(ACCRUE_PORT=port, ACCRUE_DATA_DIR=str(tmp_path / "data"))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_a_data_folder_that_cannot_be_created_ends_the_service_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = serving(ACCRUE_PORT=str(free_port()), ACCRUE_DATA_DIR=str(tmp_path / "file" / "data"))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "ACCRUE_DATA_DIR" in ended.stderr


def test_models_of_openapi_documents_are_built_at_their_first_use() -> None:
    code = (
        "from app.cli.service import _declare_openapi_models\n"
        "_declare_openapi_models()\n"
        "from fastapi.openapi.models import Info, OpenAPI\n"
        "from pydantic import BaseModel\n"
        "class Other(BaseModel): pass\n"
        "print(OpenAPI.__pydantic_complete__, Other.__pydantic_complete__)\n"
        "print(OpenAPI(openapi='3.1.0', info=Info(title='a', version='1'), paths={}).info.title)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "a"]
