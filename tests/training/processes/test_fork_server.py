"""Trainers as copies of a process that has loaded their libraries."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.planning.devices import Device
from tests.harness.runs import create_run, environment, log_of, small_data, until, with_ranks
from tests.harness.specs import make_spec
from workers.run_directory import (
    HIDDEN_VARIABLE,
    INTERRUPTED,
    LIFELINE_VARIABLE,
    SILENCE_VARIABLE,
    RunDirectory,
)
from workers.trainer_process import TrainerProcess
from workers.training.processes.filesystem_view import named_view
from workers.training.processes.fork_server import ForkedTrainer, ForkServer
from workers.training.processes.preloading import command

CPU = Device("cpu", "CPU", 2**30, "cpu")


@pytest.fixture(scope="module")
def loaded() -> Iterator[ForkServer]:
    """A server that other tests have used before."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def new() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def started(server: ForkServer, run: RunDirectory) -> ForkedTrainer:
    with run.trainer_log.open("ab") as log:
        trainer = server.start(run.path, environment(), log.fileno(), {})
    assert trainer is not None
    return trainer


def long_run(folder: Path) -> RunDirectory:
    return create_run(folder, make_spec(data=small_data(), max_steps=10_000, save_every=10_000))


def is_training(run: RunDirectory) -> bool:
    return run.metrics.exists() and run.metrics.stat().st_size > 0


def process_of(server: ForkServer) -> "subprocess.Popen[bytes]":
    assert server._server is not None
    return server._server


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def open_files(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found[int(entry.name)] = str(entry.readlink())
    return found


def test_a_copy_trains_as_a_process_of_its_own(tmp_path: Path, loaded: ForkServer) -> None:
    copied, own = create_run(tmp_path / "copied"), create_run(tmp_path / "own")
    assert started(loaded, copied).wait(60) == 0, copied.trainer_log.read_text()
    subprocess.run(command(own.path), check=True, capture_output=True)
    assert log_of(copied) == log_of(own)


def test_ranks_are_copies_of_a_copy(tmp_path: Path, loaded: ForkServer) -> None:
    run = with_ranks(long_run(tmp_path / "run"), [0.5, 0.5])
    trainer = started(loaded, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    names = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(run.path).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                names.add((entry / "comm").read_text().strip())
        except OSError:
            continue
    trainer.terminate()
    assert trainer.wait(60) == INTERRUPTED, run.trainer_log.read_text()
    assert names == {"trainer", "trainer rank 0", "trainer rank 1"}


def test_the_exit_status_is_the_trainer_s(tmp_path: Path, loaded: ForkServer) -> None:
    missing = RunDirectory(tmp_path)
    assert started(loaded, missing).wait(60) == 1
    assert "spec.json" in missing.trainer_log.read_text()
    run = long_run(tmp_path / "run")
    trainer = started(loaded, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    trainer.terminate()
    assert trainer.wait(60) == INTERRUPTED
    trainer = started(loaded, run)
    until(lambda: trainer.poll() is None and trainer.pid is not None, 10)
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL
    trainer.terminate()  # no process has its id any more, or another one


def test_an_unexpected_error_is_in_the_trainer_s_log(tmp_path: Path, loaded: ForkServer) -> None:
    run = create_run(tmp_path / "run")
    malformed = {**environment(), SILENCE_VARIABLE: "soon"}
    with run.trainer_log.open("ab") as log:
        trainer = loaded.start(run.path, malformed, log.fileno(), {LIFELINE_VARIABLE: log.fileno()})
    assert trainer is not None
    assert trainer.wait(60) == 1
    assert "ValueError: could not convert string to float: 'soon'" in run.trainer_log.read_text()


def test_the_process_table_shows_the_run(tmp_path: Path, loaded: ForkServer) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(loaded, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    shown = Path(f"/proc/{trainer.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    trainer.kill()
    trainer.wait(60)
    assert [os.fsdecode(word) for word in shown] == command(run.path)


def test_a_trainer_killed_before_its_start_is_never_started(tmp_path: Path, new: ForkServer) -> None:
    run = create_run(tmp_path / "run")
    trainer, next_run = started(new, run), create_run(tmp_path / "next")
    assert trainer.poll() is None
    assert trainer.pid is None
    trainer.kill()
    following = started(new, next_run)
    assert trainer.wait(60) == -signal.SIGKILL
    assert following.wait(60) == 0, next_run.trainer_log.read_text()
    assert not run.events.exists()
    assert run.trainer_log.read_text() == ""


@pytest.mark.thorough
def test_a_trainer_stopped_before_its_start_stops(tmp_path: Path, new: ForkServer) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(new, run)
    assert trainer.poll() is None
    assert trainer.pid is None
    trainer.terminate()
    assert trainer.wait(60) in (INTERRUPTED, -signal.SIGTERM)
    assert not is_training(run)


@pytest.mark.thorough
def test_a_trainer_ends_with_its_server_and_the_next_one_gets_a_new_server(
    tmp_path: Path, new: ForkServer
) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(new, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    process_of(new).kill()
    assert trainer.wait(60) == -signal.SIGKILL
    assert trainer.pid is not None
    assert ended(trainer.pid)
    following = create_run(tmp_path / "following")
    assert started(new, following).wait(60) == 0, following.trainer_log.read_text()


@pytest.mark.thorough
def test_a_server_that_is_killed_while_it_loads_takes_its_trainers_along(
    tmp_path: Path, new: ForkServer
) -> None:
    trainer = started(new, create_run(tmp_path / "run"))
    process_of(new).kill()
    assert trainer.wait(60) == -signal.SIGKILL


def test_a_server_that_hangs_while_it_loads_keeps_no_killed_trainer(
    tmp_path: Path, new: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.training.processes.fork_server._REACTS_WITHIN_SECONDS", 0.2)
    trainer = started(new, create_run(tmp_path / "run"))
    server = process_of(new)
    server.send_signal(signal.SIGSTOP)
    assert trainer.poll() is None
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL
    assert server.wait(60) == -signal.SIGKILL


def test_a_large_request_is_left_to_a_process_of_its_own(tmp_path: Path, loaded: ForkServer) -> None:
    run = create_run(tmp_path / "run")
    large = {**environment(), HIDDEN_VARIABLE: "x" * 2**18}
    with run.trainer_log.open("ab") as log:
        assert loaded.start(run.path, large, log.fileno(), {}) is None
        assert loaded.start(run.path, environment(), log.fileno(), {}, [log.fileno()] * 200) is None


@pytest.mark.thorough
def test_a_server_that_cannot_start_a_trainer_says_why_and_serves_the_next(
    tmp_path: Path, new: ForkServer
) -> None:
    first = create_run(tmp_path / "first")
    assert started(new, first).wait(60) == 0
    pid = process_of(new).pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    until(lambda: "anon_inode:[pidfd]" not in open_files(pid).values(), 10)
    free = [number for number in range(100) if number not in open_files(pid)]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[2], limits[1]))  # for the request, and no more
    refused = create_run(tmp_path / "refused")
    assert started(new, refused).wait(60) == 1
    assert "Too many open files" in refused.trainer_log.read_text()
    assert not refused.events.exists()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert started(new, create_run(tmp_path / "next")).wait(60) == 0
    assert process_of(new).pid == pid


@pytest.mark.thorough
def test_closing_ends_the_server_and_its_trainers(tmp_path: Path, new: ForkServer) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(new, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    server = process_of(new)
    new.close()
    assert trainer.wait(60) == -signal.SIGKILL
    assert server.returncode is not None


@pytest.mark.thorough
def test_signals_to_all_processes_of_a_service_leave_time_for_a_checkpoint(
    tmp_path: Path, new: ForkServer
) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(new, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    for pid in (process_of(new).pid, trainer.pid):
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
    assert trainer.wait(60) == INTERRUPTED
    assert list(run.checkpoints.iterdir())


def test_a_trainer_that_nobody_follows_is_killed(tmp_path: Path, loaded: ForkServer) -> None:
    run = long_run(tmp_path / "run")
    trainer = started(loaded, run)
    until(lambda: is_training(run) or trainer.poll() is not None)
    pid = trainer.pid
    assert pid is not None
    trainer._connection.close()
    until(lambda: ended(pid), 10)


def test_trainers_of_different_jobs_and_devices_share_a_server(tmp_path: Path, new: ForkServer) -> None:
    """None has a variable of its own that the server does not know as such."""
    gpus = [Device(number, f"GPU {number}", 2**30, "cuda", uuid=f"GPU-{number}") for number in range(2)]
    trainers = []
    for number, devices in enumerate([gpus[:1], gpus[1:], gpus]):
        run = create_run(tmp_path / f"run-{number}")
        view = named_view(tmp_path, run.assignment())
        trainers.append(TrainerProcess(run, devices, 60 + number, fork_server=new, view=view))
    assert all(isinstance(trainer._process, ForkedTrainer) for trainer in trainers)
    for trainer in trainers:
        trainer.kill()
    new.close()
    for trainer in trainers:
        until(lambda trainer=trainer: trainer.status() is not None, 10)
        trainer.close()


def test_what_libraries_read_while_loading_is_the_same_for_all(tmp_path: Path, loaded: ForkServer) -> None:
    run = create_run(tmp_path / "run")
    assert started(loaded, run).wait(60) == 0
    with run.trainer_log.open("ab") as log:
        changed = {**environment(), "OMP_NUM_THREADS": "17"}
        assert loaded.start(run.path, changed, log.fileno(), {}) is None  # so it loads them itself


@pytest.mark.thorough
def test_no_server_where_the_system_lacks_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    server = ForkServer()
    assert server.start(tmp_path, {}, 1, {}) is None
    trainer = TrainerProcess(create_run(tmp_path / "run"), [CPU], 60, fork_server=server)
    until(lambda: trainer.status() is not None)
    trainer.close()
    assert trainer.status() == 0


@pytest.mark.thorough
def test_the_server_has_none_of_the_worker_s_secrets(
    tmp_path: Path, new: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ACCRUE_DATABASE_URL", "postgresql://user:secret@localhost/accrue")
    trainer = TrainerProcess(create_run(tmp_path / "run"), [CPU], 60, fork_server=new)
    shown = Path(f"/proc/{process_of(new).pid}/environ")
    until(lambda: trainer.status() is not None)
    trainer.close()
    assert trainer.status() == 0
    assert b"secret" not in shown.read_bytes()
    assert b"PATH=" in shown.read_bytes()


@pytest.mark.thorough
def test_a_copy_of_a_process_that_has_a_gpu_open_loads_its_libraries_itself(tmp_path: Path) -> None:
    gpu = Path("/dev/nvidia-accrue-test")
    try:
        gpu.touch()
    except OSError:
        pytest.skip("needs the permission to make a file in /dev")
    run = long_run(tmp_path / "run")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from workers.training.processes.preloading import become_trainer, forking, preload\n"
        "preload()\n"
        "kept = os.open(sys.argv[2], os.O_RDONLY)\n"
        "with forking():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        become_trainer(Path(sys.argv[1]), os.environ)\n"
        "print(child, flush=True)\n"
        "os.wait()\n"
    )
    try:
        with subprocess.Popen(
            [sys.executable, "-c", code, str(run.path), str(gpu)], stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            until(lambda: is_training(run) or parent.poll() is not None)
            shown = Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            os.kill(child, signal.SIGKILL)
    finally:
        gpu.unlink()
    assert [os.fsdecode(word) for word in shown] == command(run.path)


def test_trainers_share_the_schemas() -> None:
    """Otherwise each copy would build them again."""
    code = (
        "import app.contract.spec as spec\n"
        "from workers.training.processes.preloading import preload\n"
        "before = spec.Spec.__pydantic_complete__\n"
        "preload()\n"
        "print(before, spec.Spec.__pydantic_complete__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
