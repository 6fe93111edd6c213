"""The acceptance test for GPUs, as far as a CPU can run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.acceptance import PARTS
from tests.gpu.checks import at_least, at_most

ROOT = Path(__file__).parents[2]
ON_CPU = (
    "environment",
    "attention",
    "memory",
    "throughput of a step",
    "resume",
    "certificate",
    "out of memory",
)


@pytest.mark.slow
def test_the_parts_run_on_a_cpu_and_say_what_needs_cuda(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.gpu.acceptance", "--device", "cpu", "--out", str(out)),
            *("--only", *ON_CPU),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = json.loads(out.read_text())["parts"]
    assert set(parts) == set(ON_CPU)
    for part in PARTS:
        if part.name in ON_CPU:
            assert (parts[part.name] == "not run: needs CUDA") == (part.on == "cuda")
    checks = [check for part in parts.values() if isinstance(part, dict) for check in part["checks"]]
    assert len(checks) >= 6
    assert all(check["holds"] for check in checks)


@pytest.mark.thorough
def test_without_a_gpu_one_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.acceptance"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "no NVIDIA GPU" in done.stdout


def test_a_check_holds_only_within_its_bound() -> None:
    assert at_most("error", 0.03, 0.03).holds
    assert not at_most("error", 0.031, 0.03).holds
    assert not at_most("error", float("nan"), 0.03).holds
    assert at_least("speed", 1.0, 1.0).holds
    assert not at_least("speed", 0.99, 1.0).holds
    assert at_least("speed", 0.99, 1.0).line.startswith("FAILS")
