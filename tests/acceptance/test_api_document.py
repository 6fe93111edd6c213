"""docs/api.md is true: its commands run as they stand, and every route is in it."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.main import create_app
from app.settings import Settings
from tests.harness.runs import write_texts
from tests.harness.service import Accrue, running
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

pytestmark = pytest.mark.thorough

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def commands() -> list[str]:
    """Every curl of the document, with its continuation lines."""
    found = "".join(blocks("sh"))
    return ["curl " + each.strip() for each in re.split(r"^curl ", found, flags=re.MULTILINE)[1:]]


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    """A service with a worker, and a small model that is called gpt2."""
    folder = tmp_path_factory.mktemp("accrue")
    ensure_tiny_gpt2(folder / "models" / "gpt2")
    with running(folder) as accrue:
        accrue.serve()
        accrue.start("worker")
        yield accrue


@pytest.fixture(scope="module")
def ended(accrue: Accrue) -> list[str]:
    """Two jobs that have trained for a few steps."""
    data = {"texts": ["one", "two", "three"], "max_length": 16}
    jobs = [accrue.submit(dataset_config=data, training_config={"max_steps": 3}) for _ in range(2)]
    assert [accrue.ended(job_id)["status"] for job_id in jobs] == ["succeeded", "succeeded"]
    return jobs


@pytest.mark.parametrize("command", commands())
def test_a_command_works_as_it_is_written(accrue: Accrue, ended: list[str], command: str) -> None:
    command = command.replace("http://localhost:8000", accrue.url)
    command = command.replace("{config or training id}", ended[0])
    if "{file id}" in command:
        command = command.replace("{file id}", accrue.upload(b'{"text": "a line of text"}\n' * 40))
    command = command.replace("ids=A&ids=B", f"ids={ended[0]}&ids={ended[1]}")
    words = shlex.split(command.replace("\\\n", " "))
    answer = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(answer.stdout)


def test_the_python_example_trains_a_model(accrue: Accrue, tmp_path: Path) -> None:
    write_texts(tmp_path / "data.jsonl", count=64)
    (example,) = blocks("python")
    script = example.replace("http://localhost:8000", accrue.url)
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    first, header, *rows = ran.stdout.strip().splitlines()
    assert first.startswith("succeeded ft:accrue/tiny-gpt2:accrue:first:")
    assert header.startswith("attempt,step,")
    assert len(rows) == 4  # 64 texts, 32 at a time, twice


def test_every_route_is_in_the_document(tmp_path: Path) -> None:
    lines = [line for line in DOCUMENT.splitlines() if not line.startswith("curl")]
    lines += [each if "-X " in each else f"GET {each}" for each in commands()]
    for path, methods in create_app(Settings(data_dir=tmp_path)).openapi()["paths"].items():
        for method in methods:
            told = rf"{method.upper()}`?[^|]*{re.escape(path)}(?![\w/{{])"
            assert any(re.search(told, line) for line in lines), f"{method.upper()} {path}"
