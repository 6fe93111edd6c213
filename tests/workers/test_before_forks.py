"""Processes that fork before they use a GPU must not look for one earlier: their forks could not use it.

bitsandbytes looks for GPUs when it is imported, and peft imports it where it is installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import app

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "module",
    [
        "workers.inference.engine_main",
        "workers.training.attempt",
        "workers.profiling.__main__",
        "workers.exports.__main__",
        "workers.exports.export_main",
        "workers.ingest",
    ],
)
def test_nothing_looks_for_gpus_before_a_fork(module: str, tmp_path: Path) -> None:
    """An engine runs to the end of its empty input; of the others, it is what they import."""
    package, imported = tmp_path / "bitsandbytes", tmp_path / "imported"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(imported)!r}, 'w')\n")
    runs = ["-m", module] if module.endswith("engine_main") else ["-c", f"import {module}"]
    path = os.pathsep.join([str(tmp_path), str(Path(app.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *runs], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not imported.exists()


def test_peft_imports_bitsandbytes_as_the_test_above_assumes(tmp_path: Path) -> None:
    package, imported = tmp_path / "bitsandbytes", tmp_path / "imported"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(imported)!r}, 'w')\n")
    subprocess.run(
        [sys.executable, "-c", "import peft"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, check=False,
    )  # fmt: skip
    assert imported.exists()
