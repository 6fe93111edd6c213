"""What a trainer sees of the data folder, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import create_run
from workers.run_directory import HIDDEN_VARIABLE, SECRET_FILES_VARIABLE, RunDirectory
from workers.training.processes.filesystem_view import named_view

ROOT = Path(__file__).parents[3]

LOOK = """
import ctypes, json, os, resource, subprocess, sys, tempfile
from pathlib import Path
from workers.run_directory import RunDirectory
from workers.training.processes import filesystem_view
from workers.training.processes.process_tree import run_sandboxed
from workers.training.processes.filesystem_view import isolate

run, hidden = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
outside, shared = os.getppid(), Path(sys.argv[3])

def attempt(work):
    try:
        return work()
    except OSError:
        return None

def look(apart):
    done = apart and isolate(run.path)
    assignment = run.assignment()
    (run.path / "written").write_text("by the trainer")
    changed = attempt(lambda: Path(assignment.data_file).write_text("changed")) is not None
    libc, parent = ctypes.CDLL(None, use_errno=True), f"/proc/{outside}"
    shared.with_suffix(".left").write_text("by the trainer")
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/"))
    upwards = [attempt(lambda: Path("/".join([".."] * steps), str(hidden).lstrip("/")).joinpath("accrue.db")
                       .read_text()) for steps in range(12)]
    stat_of = lambda path: os.stat(path).st_mode
    disks = [str(path) for path in Path("/dev").rglob("*") if attempt(lambda: stat_of(path)) is not None
             and (stat_of(path) & 0o170000) == 0o060000]
    print(json.dumps({
        "isolated": done, "changed": changed, "data": Path(assignment.data_file).read_text()[:8],
        "seen": sorted(str(path.relative_to(hidden)) for path in hidden.rglob("*")),
        "of_others": [attempt(lambda: Path(f"{parent}/{name}/environ").read_bytes().decode())
                      for name in (".", f"task/{outside}")],
        "root_of_others": attempt(lambda: os.listdir(f"{parent}/root{hidden}")),
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "limited": attempt(lambda: resource.prlimit(outside, resource.RLIMIT_CORE, (0, 0))) is not None,
        "taken_away": libc.umount2(os.fsencode(hidden), 2) == 0,
        "by_a_child": subprocess.run(["umount", "-l", str(hidden)], capture_output=True).returncode == 0,
        "elsewhere": [attempt(lambda: Path(name).open("ab")) is None
                      for name in (filesystem_view.__file__, json.__file__, "/etc/planted",
                                   str(Path.home() / ".cache" / "planted"), "/proc/sys/kernel/core_pattern")],
        "of_its_own": [attempt(lambda: Path(name).write_text("x")) is not None
                       for name in (f"{tempfile.gettempdir()}/own", "/dev/shm/own", "/tmp/own")],
        "shared": attempt(lambda: shared.read_text()),
        "upwards": [found for found in upwards if found is not None], "disks": disks,
        "kernel": [str(path) for path in Path("/proc/irq").glob("*") if attempt(lambda: path.open("ab"))],
        "null": attempt(lambda: Path("/dev/null").write_text("x")),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2)[:-1],
        "group": os.getpgrp(),
        "compiles_in": cache.is_relative_to(tempfile.gettempdir()),
        "model": attempt(lambda: (Path(assignment.model_path) / "planted").write_text("for all")),
    }), flush=True)
    return 0

sys.exit(run_sandboxed(look, isolated=bool(os.environ["ACCRUE_HIDDEN_FOLDER"])))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with two runs, their data, a database and somebody's upload."""
    data = tmp_path / "data"
    (data / "files").mkdir(parents=True)
    for name in ("file-1", "file-2"):
        (data / "files" / name).write_text('{"text": "a secret"}\n')
    (data / "accrue.db").write_text("everybody's jobs")
    for name in ("ftjob-1", "ftjob-2"):
        (data / "runs" / name).mkdir(parents=True)
    return data


def laid(folder: Path) -> RunDirectory:
    assignment = create_run(folder.parent / "scratch" / "run").assignment()
    run = RunDirectory(folder / "runs" / "ftjob-1")
    run.write_assignment(assignment.model_copy(update={"data_file": str(folder / "files" / "file-1")}))
    return run


def look(run: RunDirectory, hidden: Path | None, *words: str) -> dict[str, Any]:
    """What a process with a trainer's isolation can do.

    Args:
        hidden: the folder to hide; None hides nothing.
        words: put before the command.
    """
    shared = Path(tempfile.gettempdir()) / f"accrue-test-{os.getpid()}"
    shared.write_text("of somebody else")
    command = [*words, sys.executable, "-c", LOOK, str(run.path), str(run.path.parent.parent), str(shared)]
    env = {**os.environ, HIDDEN_VARIABLE: "" if hidden is None else named_view(hidden, run.assignment())}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        left = shared.with_suffix(".left").exists()
    finally:
        shared.unlink()
        shared.with_suffix(".left").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "left": left}


def test_a_trainer_sees_only_its_own_run_and_data(folder: Path) -> None:
    (folder.parent / "scratch").mkdir()
    run = laid(folder)
    link = folder.parent / "link"
    link.symlink_to(folder)
    for hidden in (folder, link):  # by whichever name
        seen = look(run, hidden)
        if not seen["isolated"]:
            pytest.skip("this machine lets no process change its view")
        assert seen["seen"] == [
            "files", "files/file-1", "runs", "runs/ftjob-1", "runs/ftjob-1/spec.json", "runs/ftjob-1/written"
        ]  # fmt: skip
        assert (seen["changed"], seen["data"]) == (False, '{"text":')
        assert seen["of_others"] == [None, None]
        assert seen["root_of_others"] is None
        assert not seen["taken_away"]
        assert not seen["by_a_child"]
        assert seen["elsewhere"] == [True] * 5
        assert seen["of_its_own"] == [True] * 3
        assert seen["shared"] is None
        assert seen["compiles_in"]
        assert seen["upwards"] == []
        assert seen["disks"] == []
        assert seen["kernel"] == []
        assert seen["null"] == 1
        assert seen["descriptors"] == []
        assert seen["group"] <= 3  # of its own process ids
        assert seen["processes"] <= 3
        assert not seen["limited"]
        assert not seen["left"]
        assert (run.path / "written").read_text() == "by the trainer"
        (run.path / "written").unlink()
    assert (folder / "accrue.db").read_text() == "everybody's jobs"


def test_without_namespaces_the_trainer_runs_unisolated(folder: Path) -> None:
    (folder.parent / "scratch").mkdir()
    run = laid(folder)
    assert not look(run, None)["isolated"]  # it was not requested
    seen = look(run, folder.parent / "elsewhere")
    assert not seen["isolated"]
    assert "accrue.db" in seen["seen"]
    if os.getuid() == 0:
        forbidden = look(run, folder, "setpriv", "--bounding-set=-sys_admin")
        assert not forbidden["isolated"]
        assert "files/file-2" in forbidden["seen"]


def test_the_view_ignores_an_assignment_rewritten_by_the_trainer(folder: Path) -> None:
    """What an earlier attempt left behind may have rewritten it."""
    (folder.parent / "scratch").mkdir()
    run = laid(folder)
    view = named_view(folder, run.assignment())
    planted = {"data_file": str(folder / "files" / "file-2"), "model_path": str(folder / "x")}
    run.write_assignment(run.assignment().model_copy(update=planted))
    env = {**os.environ, HIDDEN_VARIABLE: view}
    script = LOOK.replace("assignment = run.assignment()", "assignment = run.assignment().model_copy(update={"
                          "'data_file': str(hidden / 'files' / 'file-1')})")  # fmt: skip
    command = [sys.executable, "-c", script, str(run.path), str(folder), str(folder.parent / "none")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    seen = json.loads(done.stdout)
    if not seen["isolated"]:
        pytest.skip("this machine lets no process change its view")
    assert "files/file-2" not in seen["seen"]
    assert "accrue.db" not in seen["seen"]


def test_the_base_model_is_created_before_isolation_and_read_only_for_the_trainer(folder: Path) -> None:
    (folder.parent / "scratch").mkdir()
    run = laid(folder)
    model = folder / "models" / "accrue" / "tiny-gpt2"
    model.mkdir(parents=True)
    run.write_assignment(run.assignment().model_copy(update={"model_path": str(model)}))
    seen = look(run, folder)
    if not seen["isolated"]:
        pytest.skip("this machine lets no process change its view")
    assert "models/accrue/tiny-gpt2" in seen["seen"]
    assert seen["model"] is None


@pytest.mark.skipif(os.getuid() != 0, reason="another user can be taken on by root alone")
def test_non_root_users_are_isolated_too(folder: Path) -> None:
    (folder.parent / "scratch").mkdir()
    run = laid(folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in folder.parents[:-1]:
        path.chmod(path.stat().st_mode | 0o055)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if subprocess.run(
        [*nobody, sys.executable, "-c", "import workers.training.processes.filesystem_view"], cwd=ROOT
    ).returncode:
        pytest.skip("another user cannot read this checkout")
    seen = look(run, folder, *nobody)
    if not seen["isolated"]:
        pytest.skip("this machine lets no user have a view of its own")
    assert "accrue.db" not in seen["seen"]
    assert (seen["changed"], seen["taken_away"], seen["by_a_child"]) == (False, False, False)


@pytest.mark.parametrize(
    ("hidden", "has_namespaces", "expected"),
    [("view", True, "isolate"), ("view", False, "drop_capabilities"), ("", False, None)],
)
def test_without_namespaces_the_trainer_still_gives_up_its_capabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, has_namespaces: bool, expected: str | None
) -> None:
    from workers.training import attempt

    called: list[str] = []
    for name in ("isolate", "drop_capabilities"):
        monkeypatch.setattr(attempt, name, lambda *_, name=name: called.append(name))
    for name in ("limit", "die_with_parent"):
        monkeypatch.setattr(attempt, name, lambda: None)
    monkeypatch.setattr(attempt, "InterruptSignal", lambda **_: lambda: False)
    monkeypatch.setattr(attempt, "fetch_in_child", lambda work: 0)
    monkeypatch.setattr(attempt, "attempt", lambda run, stop: 0)
    monkeypatch.setattr(attempt, "run_sandboxed", lambda work, **_: work(has_namespaces))
    monkeypatch.setenv("ACCRUE_HIDDEN_FOLDER", hidden)
    assert attempt.train(create_run(tmp_path / "run")) == 0
    assert called == ([] if expected is None else [expected])


SECRETS = """
import json, os, sys
from pathlib import Path
from workers.training.processes.filesystem_view import restrict_view
from workers.training.processes.process_tree import run_sandboxed

def read(path):
    try:
        return path.read_text()
    except OSError:
        return None

def look(apart):
    home = Path.home()
    needed = {home: True} | {Path(path): False for path in sys.argv[2:]}
    done = apart and restrict_view(Path(sys.argv[1]), needed)
    paths = sorted(path for path in home.rglob("*") if path.is_file() or path.is_char_device())
    print(json.dumps({"isolated": done, "read": {str(path.relative_to(home)): read(path) for path in paths}}),
          flush=True)
    return 0

sys.exit(run_sandboxed(look, isolated=True))
"""


def test_keys_and_passwords_in_the_home_folder_are_hidden(tmp_path: Path) -> None:
    home, hidden = tmp_path / "home", tmp_path / "data"
    hidden.mkdir()
    cache = ".cache/huggingface"
    for name in (".netrc", ".ssh/id_rsa", ".aws/credentials", f"{cache}/token", f"{cache}/stored_tokens",
                 "service/.env", "model/config.json", f"{cache}/hub/model"):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    env = {**own, "HOME": str(home), SECRET_FILES_VARIABLE: str(home / "service" / ".env")}
    command = [sys.executable, "-c", SECRETS, str(hidden)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout)
    if not found["isolated"]:
        pytest.skip("this machine lets no process change its view")
    visible = {name: text for name, text in found["read"].items() if text}
    packages = home / "service" / "venv" / "lib.py"  # a virtual environment may be called .env
    packages.parent.mkdir()
    packages.write_text("code")
    env[SECRET_FILES_VARIABLE] = str(packages.parent)
    done = subprocess.run([*command, str(packages)], env=env, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout)["read"]["service/venv/lib.py"] == "code"
    assert visible == {name: name for name in ("model/config.json", f"{cache}/hub/model")}, done.stderr
