"""The wheel holds all that a service and a worker need, without a checkout beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import app, workers.supervisor, workers.training.model_files, sys
from pathlib import Path
from app.migrations import newest_revision, upgrade
assert Path(app.__file__).is_relative_to(sys.argv[1]), app.__file__
upgrade(f"sqlite:///{sys.argv[1]}/accrue.db")
assert (Path(app.__file__).parent / "dashboard" / "index.html").is_file()
print("revision", newest_revision())
"""


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


def test_an_installed_wheel_migrates_a_database(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(installed)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    newest = max(path.name[:4] for path in (ROOT / "alembic" / "versions").glob("0*.py"))
    assert done.stdout.strip() == f"revision {newest}"


def test_a_wheel_brings_no_package_in_the_way_of_alembic(installed: Path) -> None:
    assert not (installed / "alembic").exists()
    assert (installed / "app" / "alembic" / "env.py").is_file()
