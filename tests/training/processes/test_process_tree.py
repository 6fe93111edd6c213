"""Enclosed work: signals reach it, its exit status comes back, and no process is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.runs import until

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, re, signal, sys, time
from pathlib import Path
from workers.training.processes.process_tree import run_sandboxed

def work(apart):
    what, folder = sys.argv[1], Path(sys.argv[2])
    (folder / "apart").write_text(str(apart))
    match what:
        case "status": return 75
        case "exit": sys.exit(74)
        case "raise": raise ValueError("broken")
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "crashed": os.kill(os.getpid(), signal.SIGSEGV)
        case "busy":
            (folder / "alive").touch()
            (folder / "ready").touch()
            while True:  # no thread of this process gets a word in
                (folder / "alive").touch()
                re.match("(a+)+b", "a" * 24)
        case "orphan" | "orphaned" | "waits":
            if what.startswith("orphan") and os.fork() == 0:
                os.setsid()
                if os.fork() > 0:
                    os._exit(0)
                while True:
                    (folder / "alive").touch()
                    time.sleep(0.01)
            if what == "orphan":
                while not (folder / "alive").exists():
                    time.sleep(0.01)
                return 0
            if what == "orphaned":
                while not (folder / "alive").exists():
                    time.sleep(0.01)
                (folder / "ready").touch()
                time.sleep(60)
            stopped = []
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
            (folder / "alive").touch()
            (folder / "ready").touch()
            while not stopped:
                (folder / "alive").touch()
                time.sleep(0.01)
            return 7

sys.exit(run_sandboxed(work, isolated=sys.argv[3] == "apart"))
"""


def started(what: str, folder: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what, str(folder), how], cwd=ROOT, stderr=subprocess.DEVNULL
    )


def is_still(folder: Path) -> bool:
    """Whether the process that keeps touching a file has ended."""
    seen = (folder / "alive").stat().st_mtime_ns
    try:
        until(lambda: (folder / "alive").stat().st_mtime_ns != seen, 0.5)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("how", ["apart", "together"])
@pytest.mark.parametrize(
    ("what", "status"),
    [("status", 75), ("exit", 74), ("raise", 1), ("killed", -signal.SIGKILL), ("crashed", -signal.SIGSEGV)],
)
def test_the_outer_process_ends_like_the_work(tmp_path: Path, what: str, status: int, how: str) -> None:
    assert started(what, tmp_path, how).wait(30) == status


@pytest.mark.parametrize("how", ["apart", "together"])
def test_signals_reach_the_work_and_its_exit_status_is_returned(tmp_path: Path, how: str) -> None:
    process = started("waits", tmp_path, how)
    until((tmp_path / "ready").exists, 30)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 7


@pytest.mark.parametrize("how", ["apart", "together"])
def test_processes_that_the_work_leaves_behind_are_killed(tmp_path: Path, how: str) -> None:
    assert started("orphan", tmp_path, how).wait(30) == 0
    assert is_still(tmp_path)


@pytest.mark.parametrize("how", ["apart", "together"])
@pytest.mark.parametrize("what", ["waits", "busy", "orphaned"])
def test_killing_the_outermost_process_ends_everything(tmp_path: Path, what: str, how: str) -> None:
    process = started(what, tmp_path, how)
    until((tmp_path / "ready").exists, 30)
    process.kill()
    process.wait()
    until(lambda: is_still(tmp_path), 10)


def test_the_outermost_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However busy the work is; when the thread that started it ends, too."""
    command = [sys.executable, "-c", SCRIPT, "busy", str(tmp_path), "apart"]
    starter = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(60)"],
        cwd=ROOT,
    )
    until((tmp_path / "ready").exists, 30)
    starter.kill()
    starter.wait()
    until(lambda: is_still(tmp_path), 10)


def test_root_gets_a_pid_namespace_if_allowed(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("another user may not be allowed to")
    allowed = subprocess.run(["unshare", "--pid", "--mount", "true"], capture_output=True).returncode == 0
    assert started("status", tmp_path, "apart").wait(30) == 75
    assert (tmp_path / "apart").read_text() == str(allowed)


@pytest.mark.parametrize("how", ["apart", "together"])
@pytest.mark.parametrize("end", ["closed", "silent"])
def test_the_work_ends_when_the_supervisor_closes_its_lifeline_or_falls_silent(
    tmp_path: Path, end: str, how: str
) -> None:
    theirs, lifeline = os.pipe()
    patience = "0.5" if end == "silent" else "60"
    script = SCRIPT.replace(
        "sys.exit(run_sandboxed(",
        "from workers.training.processes.lifeline import Lifeline\n"
        f"lifeline = Lifeline({theirs}, {patience})\n"
        "sys.exit(run_sandboxed(",
    ).replace('== "apart")', '== "apart", lifeline=lifeline)')
    process = subprocess.Popen(
        [sys.executable, "-c", script, "busy", str(tmp_path), how], cwd=ROOT, pass_fds=[theirs]
    )
    os.close(theirs)
    until((tmp_path / "ready").exists, 30)
    if end == "closed":
        os.close(lifeline)
    assert process.wait(30) == 1
    until(lambda: is_still(tmp_path), 10)
    if end == "silent":
        os.close(lifeline)


def test_work_still_runs_if_namespaces_cannot_be_set_up(tmp_path: Path) -> None:
    """As on systems that let a user create namespaces, and then forbid setting them up."""
    script = SCRIPT.replace(
        "sys.exit(run_sandboxed(",
        "from workers.training.processes import process_tree\n"
        "def forbidden(): raise PermissionError(1, 'Operation not permitted')\n"
        "process_tree._enter_namespaces = forbidden\n"
        "sys.exit(run_sandboxed(",
    )
    process = subprocess.Popen([sys.executable, "-c", script, "status", str(tmp_path), "apart"], cwd=ROOT)
    assert process.wait(30) == 75
    assert (tmp_path / "apart").read_text() == "False"
