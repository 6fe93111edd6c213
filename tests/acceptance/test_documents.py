"""README and guides are correct: their commands run, their links resolve, nothing is left out.

docs/api.md has a test of its own, and so has docs/security.md.
"""

import ast
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.jobs.lifecycle import TIMEOUT
from app.jobs.request_schemas import TrainingRequest
from app.jobs.training_config import TrainingConfig
from tests.harness.commands import commands
from tests.harness.runs import until, write_texts
from tests.harness.service import Accrue, running
from workers.job_end import DEVICE_LOST
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
GUIDES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *GUIDES]
WITH_THEIR_OWN_TEST = ("docs/api.md", "docs/security.md")
RUN = [name for name in DOCUMENTS if name not in WITH_THEIR_OWN_TEST]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def with_blocks(language: str) -> list[str]:
    return [name for name in RUN if blocks(name, language)]


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    """A service with a worker, and a model of one's own."""
    folder = tmp_path_factory.mktemp("accrue")
    ensure_tiny_gpt2(folder / "models" / "my-model")
    with running(folder) as accrue:
        accrue.serve()
        accrue.start("worker", ACCRUE_PROFILER="true", ACCRUE_INFERENCE="auto")
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
        yield accrue


@pytest.mark.parametrize("name", with_blocks("bash"))
def test_documented_commands_run_unchanged(accrue: Accrue, tmp_path: Path, name: str) -> None:
    """One after another; a plan may say that it does not fit, which is status 2."""
    write_texts(tmp_path / "data.jsonl", count=64)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**accrue.env, "ACCRUE_URL": accrue.url, "PATH": path, "HOME": str(tmp_path), "COLUMNS": "160"}
    for command in commands_of(name):
        own = command.replace("http://localhost:8000", accrue.url)
        done = subprocess.run(
            ["bash", "-c", own], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=180,
        )  # fmt: skip
        allowed = (0, 2) if own.startswith("accrue plan ") else (0,)
        assert done.returncode in allowed, f"{own}\n{done.stdout}{done.stderr}"
        if own.startswith("accrue keys create "):
            env["ACCRUE_API_KEY"] = done.stdout.strip()
    if "ACCRUE_API_KEY" in env:
        open_again(accrue)


def commands_of(name: str) -> list[str]:
    """Each with the lines that belong to it."""
    text = "".join(blocks(name, "bash"))
    return [each for each in re.split(r"^(?=(?:accrue|curl) )", text, flags=re.MULTILINE) if each.strip()]


def open_again(accrue: Accrue) -> None:
    """Deletes all keys and restarts the service, so that it needs none again."""
    with closing(sqlite3.connect(accrue.data / "accrue.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM keys")
    service = accrue.processes.pop(0)
    service.terminate()
    service.wait(30)
    accrue.serve()
    accrue.processes.insert(0, accrue.processes.pop())


@pytest.mark.parametrize("name", with_blocks("python"))
def test_documented_python_runs_unchanged(accrue: Accrue, tmp_path: Path, name: str) -> None:
    write_texts(tmp_path / "data.jsonl", count=64)
    for example in blocks(name, "python"):
        script = example.replace("http://localhost:8000", accrue.url)
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documented_make_targets_exist(name: str) -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE)
    assert set(told) <= there


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs/commands.md").read_text()
    groups = ("keys",)  # which do nothing by themselves
    for words in commands():
        assert f"`accrue {' '.join(words)}`" in text or words in {(group,) for group in groups}, words


def test_every_guide_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in GUIDES if f"]({name})" not in text] == []


def test_documented_defaults_are_those_of_requests() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)`", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for field, value in rows:
        owner, _, name = field.rpartition(".")
        model = TrainingConfig if owner == "training_config" else TrainingRequest
        default = model.model_fields[name].default
        assert value == (str(default).lower() if isinstance(default, bool) else str(default)), field


def _codes() -> set[str]:
    """The error codes with which a job can fail: literals where a failure is made."""
    found = {TIMEOUT, DEVICE_LOST}
    for source in [*ROOT.glob("workers/**/*.py"), *ROOT.glob("app/**/*.py")]:
        for node in ast.walk(ast.parse(source.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in ("CannotTrain", "Failure"):
                given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "code")]
                found |= {each.value for each in given if isinstance(each, ast.Constant)}
    return found


def _types_of_events() -> set[str]:
    """The types of a job's events: literals where an event is recorded."""
    found: set[str] = set()
    for source in [*ROOT.glob("workers/**/*.py"), *ROOT.glob("app/**/*.py")]:
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            place = {"event": 0, "record_event": 2, "record_event_without_webhook": 3}.get(name)
            given = [] if place is None else node.args[place : place + 1]
            if name == "EventLine":
                given = [each.value for each in node.keywords if each.arg == "type"]
            found |= {each.value for each in given if isinstance(each, ast.Constant)}
    return found


@pytest.mark.parametrize(("section", "used"), [("## Why", _codes()), ("## Events", _types_of_events())])
def test_every_error_code_and_every_event_is_documented(section: str, used: set[str]) -> None:
    text = (ROOT / "docs/errors.md").read_text()
    table = text[text.index(section) :].split("\n## ")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    documented = {code for cell in first for code in re.findall(r"`([a-z_]+)`", cell)}
    by_state = {"succeeded", "failed"} if section == "## Events" else set()  # types that are no literals
    assert used == documented - by_state
