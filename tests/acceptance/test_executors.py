"""Trainers that an engine runs: the same guarantees as for trainers of a worker's own machine."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import end_of, is_alive, submit
from tests.harness.ray_cluster import IS_HERE as RAY_IS_HERE
from tests.harness.ray_cluster import RayCluster, ray_cluster
from tests.harness.runs import log_of, until
from tests.harness.service import TRAINING, Accrue
from tests.harness.slurm import IS_HERE as SLURM_IS_HERE
from tests.harness.slurm import Slurm, slurm_cluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(shared: Accrue) -> dict[str, Any]:
    """The end of a run that a worker trained on its own machine."""
    job_id = submit(shared)
    assert shared.ended(job_id)["status"] == "succeeded"
    return end_of(shared, job_id)


@pytest.fixture
def engine(accrue: Accrue) -> Accrue:
    """A service whose worker runs trainers in an engine: here, processes that do not belong to the worker."""
    accrue.env |= {"ACCRUE_EXECUTOR": "process", "ACCRUE_LEASE_SECONDS": "8"}
    accrue.serve()
    return accrue


def test_a_job_in_an_engine_ends_as_on_the_worker_s_machine(
    engine: Accrue, undisturbed: dict[str, Any]
) -> None:
    engine.start("worker")
    job_id = submit(engine)
    job = engine.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 1), job["error"]
    assert job["device"] == "process:0"
    assert end_of(engine, job_id) == undisturbed


@pytest.mark.slow
def test_a_job_in_an_engine_is_paused_resumed_and_cancelled(engine: Accrue) -> None:
    engine.start("worker")
    job_id = submit(engine, max_steps=100_000)
    until(lambda: engine.steps_logged(job_id) >= 3)
    engine.post(f"{TRAINING}/{job_id}/pause")
    until(lambda: engine.job(job_id)["status"] == "paused", 30)
    assert engine.trainer_of(job_id) is None
    steps = engine.steps_logged(job_id)
    engine.post(f"{TRAINING}/{job_id}/resume")
    until(lambda: engine.steps_logged(job_id) > steps)
    engine.post(f"{TRAINING}/{job_id}/cancel")
    assert engine.ended(job_id)["status"] == "cancelled"
    until(lambda: engine.trainer_of(job_id) is None, 20)


@pytest.mark.slow
def test_a_killed_worker_s_trainer_in_an_engine_ends_and_the_job_resumes(
    engine: Accrue, undisturbed: dict[str, Any]
) -> None:
    """Nothing but the missing renewals ends it."""
    worker = engine.start("worker")
    job_id = submit(engine)
    until(lambda: engine.steps_logged(job_id) >= 10)
    trainer = engine.trainer_of(job_id)
    assert trainer is not None
    worker.kill()
    until(lambda: not is_alive(trainer), 20)
    engine.start("worker")
    job = engine.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2), job["error"]
    assert end_of(engine, job_id) == undisturbed


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not SLURM_IS_HERE:
        pytest.skip("needs root, and Debian's slurmctld, slurmd and slurm-client: make test-executors")
    with slurm_cluster(tmp_path / "slurm") as cluster:
        yield cluster


@pytest.fixture
def in_slurm(accrue: Accrue, slurm: Slurm) -> Accrue:
    accrue.env |= {"ACCRUE_EXECUTOR": "slurm", "ACCRUE_CPU_DEVICES": "2"}
    accrue.env |= {"ACCRUE_SLURM_OPTIONS": "--cpus-per-task=1"} | slurm.environment
    accrue.serve()
    accrue.start("worker")
    return accrue


def messages(accrue: Accrue, job_id: str) -> str:
    """What the job's events say, all together."""
    found = accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]
    return " ".join(event["message"] for event in found)


@pytest.mark.slow
def test_slurm_runs_a_job_although_its_controller_fails_meanwhile(
    in_slurm: Accrue, slurm: Slurm, undisturbed: dict[str, Any]
) -> None:
    job_id = submit(in_slurm)
    until(lambda: in_slurm.steps_logged(job_id) >= 3)
    slurm.stop("slurmctld")
    time.sleep(15)
    slurm.start("slurmctld")
    job = in_slurm.ended(job_id)
    assert (job["status"], job["attempt"], job["device"]) == ("succeeded", 1, "slurm:0"), job["error"]
    assert end_of(in_slurm, job_id) == undisturbed


@pytest.mark.slow
def test_a_job_waits_in_slurm_s_queue_and_is_cancelled_there(in_slurm: Accrue, slurm: Slurm) -> None:
    slurm.sbatch("--exclusive", "sleep 300", partition="high")
    until(lambda: "RUNNING" in slurm.call("squeue", "--noheader", "--format=%T"), 30)
    job_id = submit(in_slurm)
    until(lambda: "The trainer waits in slurm" in messages(in_slurm, job_id), 30)
    assert in_slurm.job(job_id)["status"] == "running"
    in_slurm.post(f"{TRAINING}/{job_id}/cancel")
    assert in_slurm.ended(job_id)["status"] == "cancelled"
    assert f"accrue-{job_id}" not in slurm.call("squeue", "--noheader", "--format=%j %T", "--states=PD,R")
    slurm.call("scancel", f"--user={os.getuid()}")
    until(lambda: not slurm.call("squeue", "--noheader"), 30)


@pytest.mark.slow
def test_a_job_that_slurm_preempts_writes_a_checkpoint_and_is_submitted_again(
    in_slurm: Accrue, slurm: Slurm, undisturbed: dict[str, Any]
) -> None:
    job_id = submit(in_slurm, save_every=1000)
    until(lambda: in_slurm.steps_logged(job_id) >= 10)
    slurm.sbatch("--exclusive", "sleep 10", partition="high")
    job = in_slurm.ended(job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2), job["error"]
    assert "slurm took its devices away" in messages(in_slurm, job_id)
    assert end_of(in_slurm, job_id) == undisturbed


@pytest.mark.slow
def test_a_job_that_slurm_refuses_fails_with_slurm_s_reason(accrue: Accrue, slurm: Slurm) -> None:
    accrue.env |= {"ACCRUE_EXECUTOR": "slurm", "ACCRUE_SLURM_OPTIONS": "--partition=gpus"}
    accrue.env |= slurm.environment
    accrue.serve()
    accrue.start("worker")
    job = accrue.ended(submit(accrue))
    assert (job["status"], job["error"]["code"]) == ("failed", "not_started")
    assert "invalid partition" in job["error"]["message"]


@pytest.fixture
def ray() -> Iterator[RayCluster]:
    if not RAY_IS_HERE:
        pytest.skip("needs Ray: make test-executors")
    with ray_cluster(Path(tempfile.mkdtemp(prefix="ray"))) as cluster:  # short, for its sockets' names
        yield cluster


@pytest.fixture
def in_ray(accrue: Accrue, ray: RayCluster) -> Accrue:
    accrue.env |= {"ACCRUE_EXECUTOR": "ray", "ACCRUE_RAY_ADDRESS": ray.address}
    accrue.env |= {"ACCRUE_CPU_DEVICES": "2", "ACCRUE_DEVICES_PER_NODE": "1"}
    accrue.env |= {"ACCRUE_RESERVE_AFTER_SECONDS": "2", "ACCRUE_LEASE_SECONDS": "10"}
    accrue.serve()
    return accrue


SGD = {"optimizer": "sgd", "learning_rate": 0.1}
"""Its steps are as small as the gradient; Adam's would amplify the rounding of sums over other ranks."""


def check_curve(accrue: Accrue, job_id: str, steps: int, alone: list[dict[str, Any]]) -> None:
    """Checks that the job's log has each step once, with the samples and losses of a run on one device."""
    log = log_of(accrue.run(job_id))
    assert [line["step"] for line in log] == list(range(1, steps + 1))
    for one, other in zip(log, alone, strict=True):
        assert (one["samples"], one["tokens"]) == (other["samples"], other["tokens"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.slow
def test_ray_runs_a_job_on_nodes_that_come_and_go(in_ray: Accrue, ray: RayCluster) -> None:
    """On one node, then two; paused and resumed; then on the one that is left; then on two again."""
    steps = 400
    second = ray.add_node()
    in_ray.start("worker")
    alone = submit(in_ray, max_steps=steps, **SGD)
    assert in_ray.ended(alone, 300)["status"] == "succeeded"

    job_id = submit(in_ray, devices=2, max_steps=steps, **SGD)
    until(lambda: in_ray.steps_logged(job_id) >= 20, 120)
    assert in_ray.job(job_id)["device"] == "ray:0,ray:1"
    in_ray.post(f"{TRAINING}/{job_id}/pause")
    until(lambda: in_ray.job(job_id)["status"] == "paused", 60)
    done = in_ray.steps_logged(job_id)
    in_ray.post(f"{TRAINING}/{job_id}/resume")
    until(lambda: in_ray.steps_logged(job_id) > done + 5, 120)

    ray.lose(second)
    until(lambda: in_ray.job(job_id)["device"] == "ray:0", 120)
    done = in_ray.steps_logged(job_id)
    until(lambda: in_ray.steps_logged(job_id) > done + 5, 120)
    ray.add_node()
    until(lambda: in_ray.job(job_id)["device"] == "ray:0,ray:1", 120)
    job = in_ray.ended(job_id, 300)
    assert job["status"] == "succeeded", job["error"]
    check_curve(in_ray, job_id, steps, log_of(in_ray.run(alone)))


@pytest.mark.slow
def test_a_job_in_ray_is_cancelled(in_ray: Accrue) -> None:
    in_ray.start("worker")
    job_id = submit(in_ray, max_steps=100_000)
    until(lambda: in_ray.steps_logged(job_id) >= 3, 90)
    in_ray.post(f"{TRAINING}/{job_id}/cancel")
    assert in_ray.ended(job_id)["status"] == "cancelled"
    until(lambda: in_ray.trainer_of(job_id) is None, 20)
