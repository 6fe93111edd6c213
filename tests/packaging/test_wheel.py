"""The wheel holds all that a service and a worker need, without a checkout beside it."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

EMBEDDED = """
import time
from fastapi import FastAPI
from fastapi.testclient import TestClient

import app.greeting, workers
from accrue import create_app
from accrue.app.storage.migrations import newest_revision

assert app.greeting.HELLO == "hello" and workers.MINE, "the project's own packages"
platform, service = FastAPI(), create_app()
platform.mount("/tuning", service)
with TestClient(service), TestClient(platform, base_url="http://127.0.0.1") as client:
    body = {
        "model_name": "accrue/tiny-gpt2",
        "dataset_config": {"texts": ["one text", "another"], "max_length": 16},
        "training_config": {"max_steps": 2},
    }
    root = "/tuning/gradient-accumulation/training"
    made = client.post(f"{root}/with-accumulation", json=body)
    assert made.status_code == 202, made.text
    assert client.get("/tuning/").status_code == 200, "the dashboard"
    own = f"{root}/{made.json()['id']}"
    deadline = time.monotonic() + 120
    while client.get(own).json()["status"] not in ("succeeded", "failed") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert client.get(own).json()["status"] == "succeeded", client.get(own).text
print("revision", newest_revision())
"""
"""A project whose own packages are called as ours are in a checkout."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own, as an installation has it."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # building leaves traces where it builds
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(sources)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(sources)], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.thorough
def test_an_installed_wheel_is_embedded_beside_packages_of_the_same_names(
    installed: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    theirs = {"app/greeting.py": 'HELLO = "hello"\n', "workers/__init__.py": "MINE = True\n"}
    for path, content in theirs.items():
        (project / path).parent.mkdir(parents=True)
        (project / path).write_text(content)
    env = {
        **os.environ, "PYTHONPATH": str(installed), "ACCRUE_DATA_DIR": str(tmp_path / "data"),
        "ACCRUE_OFFLINE": "true", "ACCRUE_PROFILER": "false", "ACCRUE_POLL_SECONDS": "0.1",
    }  # fmt: skip
    worker = subprocess.Popen([sys.executable, "-m", "accrue.workers"], env=env, cwd=tmp_path)
    command = [sys.executable, "-c", EMBEDDED]
    try:
        done = subprocess.run(command, env=env, cwd=project, capture_output=True, text=True)
    finally:
        worker.terminate()
        worker.wait(60)
    assert done.returncode == 0, done.stdout + done.stderr
    newest = max(path.name[:4] for path in (ROOT / "alembic" / "versions").glob("0*.py"))
    assert done.stdout.strip().endswith(f"revision {newest}")


def test_a_wheel_brings_one_package_and_its_command(installed: Path) -> None:
    assert [path.name for path in installed.iterdir() if path.suffix != ".dist-info"] == ["accrue"]
    assert (installed / "accrue" / "app" / "alembic" / "env.py").is_file()
    assert (installed / "accrue" / "app" / "dashboard" / "index.html").is_file()
    [metadata] = installed.glob("*.dist-info")
    assert "accrue = accrue.app.cli:main" in (metadata / "entry_points.txt").read_text()
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "accrue.app.cli", "--version"]
    said = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert said.stdout.startswith("accrue ")


@pytest.mark.thorough
def test_trainers_of_an_installed_wheel_are_copies_of_a_process(installed: Path, tmp_path: Path) -> None:
    """`preload` finds the modules under their names in a wheel."""
    code = (
        "import sys\nfrom accrue.workers.training.processes.preloading import preload\n"
        "preload()\nprint(*sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {"torch", "transformers", "accrue.workers.training.fit"} <= loaded, done.stderr
    assert "workers" not in loaded


def test_no_module_names_our_packages_in_a_string_at_run_time() -> None:
    """In a wheel they are called accrue.app and accrue.workers; building it renames imports only."""
    found = [
        f"{path.relative_to(ROOT)}: {node.value}"
        for folder in ("app", "workers")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("files", "import_module")
        for node in call.args
        if isinstance(node, ast.Constant) and str(node.value).split(".")[0] in ("app", "workers")
    ]
    assert found == []
