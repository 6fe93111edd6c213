"""Faults injected into real processes; after each, nothing is lost or done twice, and the result is equal.

`make test-faults` runs them all, on SQLite and on PostgreSQL; `make test-all` runs the few in test_faults.py.
docs/faults.md is the table.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.harness.faults import STEPS, digest, end_of, is_alive, kill_trainer_at, submit
from tests.harness.postgresql import Server
from tests.harness.proxy import Cut, Proxy
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue, running

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

POINTS = [
    "checkpoint.weights", "checkpoint.optimizer", "checkpoint.state", "checkpoint.manifest",
    "checkpoint.written", "checkpoint.renamed", "checkpoint.retired", "trainer.stepping", "trainer.stepped",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shared: Accrue) -> dict[str, Any]:
    """The end of a run that nothing happened to."""
    return end_of(shared, succeeded(shared, submit(shared)))


def succeeded(accrue: Accrue, job_id: str, seconds: float = 240) -> str:
    job = accrue.ended(job_id, seconds)
    assert job["status"] == "succeeded", job["error"]
    return job_id


def holds(accrue: Accrue, job_id: str, undisturbed: dict[str, Any]) -> None:
    """Checks that the job ended exactly once, had one trainer at a time, and ended with identical bits."""
    succeeded(accrue, job_id)
    attempts = [json.loads(line)["attempt"] for line in whole_lines(accrue.run(job_id).metrics)]
    assert all(before <= after for before, after in pairwise(attempts)), "two trainers wrote at once"
    assert end_of(accrue, job_id) == undisturbed
    kinds = [event["type"] for event in accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]]
    assert kinds.count("succeeded") == 1
    assert accrue.trainer_of(job_id) is None


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a log that are JSON: a kill may have torn one."""
    return [line for line in path.read_bytes().splitlines() if line.startswith(b"{") and line.endswith(b"}")]


@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_killed_at(accrue: Accrue, undisturbed: dict[str, Any], point: str) -> None:
    accrue.serve()
    at = 20 if point.startswith("trainer") else 3
    accrue.start("worker", ACCRUE_FAIL_POINTS=f"{point}:kill:{at}")
    job_id = submit(accrue)
    holds(accrue, job_id, undisturbed)
    assert accrue.job(job_id)["attempt"] > 1


@pytest.mark.parametrize("point", ["trainer.saving", "trainer.saved"])
def test_a_trainer_killed_at_its_end(accrue: Accrue, undisturbed: dict[str, Any], point: str) -> None:
    accrue.serve()
    worker = accrue.start("worker", ACCRUE_FAIL_POINTS=f"{point}:kill")
    job_id = submit(accrue)
    until(lambda: accrue.job(job_id)["attempt"] == 2, 90)
    worker.kill()
    accrue.start("worker")
    holds(accrue, job_id, undisturbed)


@pytest.mark.parametrize(
    "point", ["supervisor.ordered:kill", "supervisor.ingested:kill:30", "supervisor.finishing:kill"]
)
def test_a_worker_killed_at(accrue: Accrue, undisturbed: dict[str, Any], point: str) -> None:
    accrue.serve()
    worker = accrue.start("worker", ACCRUE_FAIL_POINTS=point)
    job_id = submit(accrue)
    assert worker.wait(120) == -signal.SIGKILL
    accrue.start("worker")
    holds(accrue, job_id, undisturbed)


def test_a_worker_suspended_past_its_lease_and_continued(accrue: Accrue, undisturbed: dict[str, Any]) -> None:
    accrue.serve()
    first = accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 10)
    trainer = accrue.trainer_of(job_id)
    assert trainer is not None
    accrue.start("worker")
    until(lambda: len(accrue.get("/gradient-accumulation/workers")["data"]) == 2)
    first.send_signal(signal.SIGSTOP)
    halted = time.monotonic()
    until(lambda: not is_alive(trainer), 10)
    assert time.monotonic() - halted < 4.5  # before the lease of four seconds lets anybody else in
    until(lambda: accrue.job(job_id)["attempt"] == 2, 20)
    first.send_signal(signal.SIGCONT)
    holds(accrue, job_id, undisturbed)
    assert accrue.job(job_id)["attempt"] == 2
    assert first.poll() is None


def test_a_trainer_suspended_past_its_lease_and_continued(
    accrue: Accrue, undisturbed: dict[str, Any]
) -> None:
    accrue.serve()
    accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 10)
    trainer = accrue.trainer_of(job_id)
    assert trainer is not None
    os.kill(trainer, signal.SIGSTOP)
    time.sleep(6)
    assert accrue.job(job_id)["status"] == "running"  # the worker lives, and so the lease holds
    os.kill(trainer, signal.SIGCONT)
    holds(accrue, job_id, undisturbed)


def test_everything_killed_with_unsynced_writes_lost(accrue: Accrue, undisturbed: dict[str, Any]) -> None:
    service = accrue.start("serve")
    until(accrue.answers, 20)
    worker = accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 25)
    trainer = accrue.trainer_of(job_id)
    assert trainer is not None
    for pid in (trainer, worker.pid, service.pid):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(trainer), 5)
    run = accrue.run(job_id)
    for log in (run.metrics, run.events):  # beyond the last checkpoint nothing was synced: cut in mid-line
        content = log.read_bytes()
        log.write_bytes(content[: len(content) - len(content) // 20 - 1])
    for unfinished in run.checkpoints.glob(".step-*"):
        for file in unfinished.iterdir():
            file.write_bytes(b"")
    accrue.serve()
    accrue.start("worker")
    holds(accrue, job_id, undisturbed)


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "manifest gone"])
def test_the_newest_checkpoint_damaged(accrue: Accrue, undisturbed: dict[str, Any], damage: str) -> None:
    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue)
    newest = kill_worker_after_checkpoints(accrue, job_id, worker, 3)
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        weights.write_bytes(content[:-100])
    elif damage == "bit flipped":
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    else:
        (newest / "manifest.json").unlink()
    accrue.start("worker")
    holds(accrue, job_id, undisturbed)
    kinds = [event["type"] for event in accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]]
    assert "checkpoint_damaged" in kinds


def test_every_checkpoint_damaged(accrue: Accrue) -> None:
    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue)
    newest = kill_worker_after_checkpoints(accrue, job_id, worker, 3)
    for checkpoint in newest.parent.glob("step-*"):
        (checkpoint / "state.json").write_text("{}")
    accrue.start("worker")
    job = accrue.ended(job_id)
    assert (job["status"], job["error"]["code"]) == ("failed", "checkpoints_damaged")


def kill_worker_after_checkpoints(
    accrue: Accrue, job_id: str, worker: subprocess.Popen[bytes], count: int
) -> Path:
    """Kills a worker with its trainer; gives the newest checkpoint."""
    run = accrue.run(job_id)
    until(lambda: accrue.steps_logged(job_id) >= 7 * count + 2)
    trainer = accrue.trainer_of(job_id)
    worker.kill()
    worker.wait()
    assert trainer is not None
    until(lambda: not is_alive(trainer), 5)
    return max(run.checkpoints.glob("step-*"))


@pytest.mark.parametrize("point", ["checkpoint.optimizer:full:2", "trainer.stepping:full:20"])
def test_a_disk_that_is_full_for_a_while(accrue: Accrue, undisturbed: dict[str, Any], point: str) -> None:
    accrue.serve()
    worker = accrue.start("worker", ACCRUE_FAIL_POINTS=point)
    job_id = submit(accrue)

    def given_back() -> bool:
        job = accrue.job(job_id)  # looked at once: between two looks it could be claimed
        return bool(job["status"] == "queued" and job["attempt"] == 1)

    until(given_back, 60)
    job = accrue.job(job_id)
    assert job["waiting"]["reason"] == "retry_delay"
    told = accrue.get(f"{TRAINING}/{job_id}/events?limit=5")["data"][0]["message"]
    assert "the disk is full" in told
    assert not list(accrue.run(job_id).checkpoints.glob(".step-*"))  # the room is given back
    worker.terminate()
    assert worker.wait(30) == 0
    accrue.post(f"{TRAINING}/{job_id}/pause")
    accrue.post(f"{TRAINING}/{job_id}/resume")  # a person who has made room need not wait
    accrue.start("worker")
    holds(accrue, job_id, undisturbed)


@pytest.fixture
def small_disk(accrue: Accrue) -> Iterator[Path]:
    """The data folder on a file system of 64 MiB."""
    accrue.data.mkdir(mode=0o700)
    options = f"size=64m,mode=0700,uid={os.getuid()},gid={os.getgid()}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "accrue-test", accrue.data], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    yield accrue.data
    accrue.stop()
    subprocess.run(["umount", accrue.data], check=True)


def fill(path: Path) -> None:
    """Writes until no byte is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 2**10, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_a_file_system_that_is_full_for_a_while(
    accrue: Accrue, small_disk: Path, undisturbed: dict[str, Any]
) -> None:
    accrue.serve()
    accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 10)
    filler = small_disk / "filler"
    fill(filler)
    until(lambda: accrue.trainer_of(job_id) is None, 60)
    assert accrue.job(job_id)["status"] in ("running", "queued")  # what is there can be read
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"texts": ["one", "two"]}}
    refused = accrue.http.post(f"{TRAINING}/with-accumulation", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full"), refused.text
    filler.unlink()
    until(lambda: accrue.job(job_id)["status"] == "queued", 60)
    accrue.post(f"{TRAINING}/{job_id}/pause")
    accrue.post(f"{TRAINING}/{job_id}/resume")
    holds(accrue, job_id, undisturbed)


@pytest.mark.parametrize("point", ["service.committing", "service.committed"])
def test_a_service_killed_around_a_commit(accrue: Accrue, point: str) -> None:
    service = accrue.start("serve", ACCRUE_FAIL_POINTS=f"{point}:kill:2")
    until(accrue.answers, 20)
    body = {"dataset_config": {"texts": ["one", "two"]}, "training_config": {"max_steps": 1}}
    acknowledged = accrue.submit(**body)
    with pytest.raises(httpx.HTTPError):
        accrue.submit(**body)
    assert service.wait(10) == -signal.SIGKILL
    accrue.serve()
    accrue.start("worker")
    found = {job["id"] for job in accrue.get(TRAINING)["data"]}
    assert acknowledged in found
    assert len(found) == (1 if point == "service.committing" else 2)
    for job_id in found:
        succeeded(accrue, job_id)


def test_the_training_file_changed_under_a_running_job(accrue: Accrue, undisturbed: dict[str, Any]) -> None:
    accrue.serve()
    accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 5)
    file_id = accrue.job(job_id)["dataset"]["file_id"]
    (accrue.data / "files" / file_id).write_text('{"text": "something else"}\n')
    kill_trainer_at(accrue, job_id, 10)
    holds(accrue, job_id, undisturbed)  # it goes on from what it tokenised at the start


@pytest.mark.sqlite
def test_a_database_that_is_locked_past_the_lease(accrue: Accrue, undisturbed: dict[str, Any]) -> None:
    import sqlite3

    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue)
    until(lambda: accrue.steps_logged(job_id) >= 5)
    trainer = accrue.trainer_of(job_id)
    lock = sqlite3.connect(accrue.data / "accrue.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    assert trainer is not None
    until(lambda: not is_alive(trainer), 10)  # it does not outlive a lease that cannot be renewed
    time.sleep(20)
    lock.execute("COMMIT")
    lock.close()
    holds(accrue, job_id, undisturbed)
    assert worker.poll() is None


def test_two_workers_on_one_queue_run_each_job_once(accrue: Accrue) -> None:
    accrue.serve()
    for _ in range(2):
        accrue.start("worker")
    body = {"dataset_config": {"texts": ["one", "two"]}, "training_config": {"max_steps": 1}}
    ids = [accrue.submit(**body) for _ in range(8)]
    for job_id in ids:
        succeeded(accrue, job_id)
        assert accrue.job(job_id)["attempt"] == 1


def test_cancelling_during_the_end_records_a_single_end(accrue: Accrue) -> None:
    accrue.serve()
    accrue.start("worker")
    body = {"dataset_config": {"texts": ["one", "two"]}, "training_config": {"max_steps": 2}}
    random.seed(1)
    for _ in range(6):
        job_id = accrue.submit(**body)
        until(lambda job_id=job_id: accrue.steps_logged(job_id) >= 1)  # type: ignore[misc]
        time.sleep(random.random())
        accrue.http.post(f"{TRAINING}/{job_id}/cancel")
        job = accrue.ended(job_id)
        assert job["status"] in ("succeeded", "cancelled")
        time.sleep(0.5)
        assert accrue.job(job_id)["status"] == job["status"]
        ends = [e["type"] for e in accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]]
        assert ends.count("succeeded") + ends.count("cancelled") == 1


@pytest.mark.timeout(3600)
def test_kills_at_random_moments(accrue: Accrue, undisturbed: dict[str, Any]) -> None:
    """A hundred kills of trainers, over as many jobs as that takes.

    Between any two kills of a job there is a new checkpoint, since three crashes without one fail the job.
    """
    accrue.serve()
    accrue.start("worker")
    random.seed(int(os.environ.get("ACCRUE_FAULT_SEED", "7")))
    wanted = int(os.environ.get("ACCRUE_KILLS", "100"))
    kills = done = 0
    while kills < wanted:
        job_id = submit(accrue)
        for checkpoint in sorted(random.sample(range(STEPS // 7), min(6, wanted - kills))):
            kills += killed_at(accrue, job_id, 7 * checkpoint + random.randint(1, 6))
        holds(accrue, job_id, undisturbed)
        done += 1
    print(
        f"{kills} kills over {done} jobs: none lost, none doubled, each the same to the bit", file=sys.stderr
    )


def killed_at(accrue: Accrue, job_id: str, step: int) -> bool:
    """Kills the job's trainer at a random moment after a step; false where the job ended before."""
    while (job := accrue.job(job_id))["progress"]["step"] < step:
        if job["status"] in ("succeeded", "failed"):
            return False
        time.sleep(0.02)
    time.sleep(random.random() * 0.3)
    pid = accrue.trainer_of(job_id)
    if pid is None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def test_digests_differ_for_a_single_bit(tmp_path: Path) -> None:
    """Checks the comparison itself: a difference of one bit counts as a different result."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"\x00" * 100)
    other.write_bytes(b"\x00" * 99 + b"\x01")
    assert digest(one) != digest(other)


@pytest.mark.postgresql
def test_postgresql_restarted_under_a_running_job(
    accrue: Accrue, undisturbed: dict[str, Any], server: Server
) -> None:
    accrue.serve()
    worker = accrue.start("worker")
    job_id = submit(accrue)
    for step in (8, 25, 45):
        until(lambda step=step: accrue.steps_logged(job_id) >= step)  # type: ignore[misc]
        server.restart()
    holds(accrue, job_id, undisturbed)
    assert worker.poll() is None


@pytest.mark.timeout(1800)  # its twenty jobs start a trainer each
@pytest.mark.postgresql
@pytest.mark.parametrize("cut", ["before", "after"])
def test_connections_lost_around_commits(
    tmp_path: Path, server: Server, database_url: str, undisturbed: dict[str, Any], cut: Cut
) -> None:
    """If the answer to a commit is lost, it may have been done or not: neither service nor worker may
    lose or repeat anything."""
    proxy = Proxy(server.folder)
    name = database_url.split("?")[0].rsplit("/", 1)[1]
    with running(tmp_path, f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/{name}") as accrue:
        accrue.serve()
        worker = accrue.start("worker")
        job_id = submit(accrue)
        until(lambda: accrue.steps_logged(job_id) >= 3)
        proxy.cut = cut
        acknowledged, refused = [], 0
        body = {"dataset_config": {"texts": ["one", "two"]}, "training_config": {"max_steps": 1}}
        for _ in range(20):
            answer = accrue.http.post(
                f"{TRAINING}/with-accumulation", json={"model_name": "accrue/tiny-gpt2", **body}
            )
            if answer.is_success:
                acknowledged.append(answer.json()["id"])
            else:
                refused += 1
        until(lambda: accrue.steps_logged(job_id) >= 40)
        proxy.cut = None
        holds(accrue, job_id, undisturbed)
        found = {job["id"] for job in accrue.get(f"{TRAINING}?limit=100")["data"]}
        assert set(acknowledged) <= found
        assert len(found) <= len(acknowledged) + refused + 1
        for other in acknowledged:
            succeeded(accrue, other)
        assert proxy.cuts >= 3
        assert worker.poll() is None
    proxy.close()
