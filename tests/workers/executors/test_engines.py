"""What engines get, and what is understood of their answers, without an engine."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from app.planning.devices import Device
from app.settings import Settings
from workers.executors import protocol
from workers.executors.choose import executor_of
from workers.executors.commands import passed_on
from workers.executors.protocol import Executor, Launch, LaunchStatus, Refused, Unreachable
from workers.executors.ray_cluster import LOST_NODE, RayExecutor
from workers.executors.slurm import SlurmExecutor

LAUNCH = Launch("accrue-ftjob-1-1", Path("/data/my runs/ftjob-1"), 2, 4, True, 45.0)
GPUS = [Device(f"slurm:{n}", "A100", 2**36, "cuda") for n in range(8)]


def test_the_protocol_is_small() -> None:
    assert len(inspect.getsource(protocol).splitlines()) <= 60


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(data_dir=folder, _env_file=None, **changes)


@pytest.mark.parametrize("name", ["process", "slurm", "ray"])
def test_the_settings_choose_an_engine_and_its_devices(tmp_path: Path, name: Any) -> None:
    chosen = executor_of(settings(tmp_path, executor=name, executor_devices="A100-80GB,24GB"))
    assert chosen is not None
    engine: Executor = chosen  # mypy checks that each engine has all methods
    assert engine.name == name
    assert [device.id for device in engine._devices] == [f"{name}:0", f"{name}:1"]  # type: ignore[attr-defined]


def test_no_engine_is_the_default(tmp_path: Path) -> None:
    assert executor_of(settings(tmp_path)) is None


def test_nodes_get_no_secrets_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCRUE_DATABASE_URL", "postgresql://user:secret@host/db")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "hf_1")
    given = passed_on()
    assert "secret" not in json.dumps(given)
    assert given["HF_TOKEN"] == "hf_1"


def test_what_slurm_gets() -> None:
    script = SlurmExecutor(GPUS, "--partition=gpu --comment='two words'").render(LAUNCH)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in (
        "--job-name=accrue-ftjob-1-1",
        "--ntasks=2",
        "--gpus-per-task=4",
        "--no-requeue",
        "--signal=TERM@75",
        "--partition=gpu",
    ):
        assert f"#SBATCH {option}" in lines
    assert "#SBATCH '--output=/data/my runs/ftjob-1/executor.log'" in lines
    assert "#SBATCH '--comment=two words'" in lines
    assert lines[-1].endswith("workers.executors.node '/data/my runs/ftjob-1' accrue-ftjob-1-1")


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Puts a program in the place of one of Slurm's."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("", LaunchStatus("unknown")),
        ("PENDING|Priority", LaunchStatus("waiting", "Priority")),
        ("RUNNING|None", LaunchStatus("running")),
        ("COMPLETED|None", LaunchStatus("ended", "COMPLETED")),
        ("PREEMPTED|None", LaunchStatus("ended", "PREEMPTED", was_evicted=True)),
        ("NODE_FAIL|NodeDown", LaunchStatus("ended", "NODE_FAIL, NodeDown", was_evicted=True)),
        ("FAILED|NonZeroExitCode", LaunchStatus("ended", "FAILED, NonZeroExitCode")),
        ("CANCELLED|None\nRUNNING|None", LaunchStatus("running")),
    ],
)
def test_what_slurm_says_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, found: LaunchStatus
) -> None:
    program(tmp_path, monkeypatch, "squeue", f"printf '%s\\n' '{printed}'")
    assert SlurmExecutor(GPUS).poll("accrue-1") == found


def test_a_job_that_slurm_has_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "sbatch", f"echo submitted >> {tmp_path}/calls")
    program(tmp_path, monkeypatch, "squeue", "echo 'PENDING|Priority'")
    SlurmExecutor(GPUS).submit(LAUNCH)
    assert not (tmp_path / "calls").exists()
    program(tmp_path, monkeypatch, "squeue", "echo 'FAILED|None'")
    SlurmExecutor(GPUS).submit(LAUNCH)
    assert (tmp_path / "calls").read_text() == "submitted\n"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", Refused),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", Unreachable),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Unreachable),
    ],
)
def test_an_error_of_sbatch_is_final_only_if_slurm_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, kind: type[Exception]
) -> None:
    program(tmp_path, monkeypatch, "squeue", "true")
    program(tmp_path, monkeypatch, "sbatch", f"echo '{error}' >&2; exit 1")
    with pytest.raises(kind):
        SlurmExecutor(GPUS).submit(LAUNCH)


def test_a_machine_without_slurm_cannot_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unreachable, match="sinfo"):
        SlurmExecutor(GPUS).devices()


class Cluster:
    """A Ray cluster's REST interface."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.alive = 2
        self.status = 200

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.status != 200:
            return httpx.Response(self.status, text="Traceback\nValueError: no")
        path = request.url.path
        if path == "/nodes":
            node = {"raylet": {"state": "ALIVE", "resourcesTotal": {"GPU": 3.0, "CPU": 8.0}}}
            return httpx.Response(200, json={"data": {"summary": [node] * self.alive}})
        if request.method == "POST" and path == "/api/jobs/":
            asked = json.loads(request.content)
            self.jobs[asked["submission_id"]] = {"status": "PENDING", **asked}
            return httpx.Response(200, json={})
        name = path.split("/")[3]
        if name not in self.jobs:
            return httpx.Response(404, text="no such job")
        return httpx.Response(200, json=self.jobs[name])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def ray(cluster: Cluster) -> RayExecutor:
    made = RayExecutor(GPUS, "http://head:8265")
    made._http = httpx.Client(base_url="http://head:8265", transport=httpx.MockTransport(cluster.answer))
    return made


def test_ray_offers_the_devices_of_the_nodes_that_are_alive(ray: RayExecutor, cluster: Cluster) -> None:
    assert len(ray.devices()) == 6
    cluster.alive = 1
    assert len(ray.devices()) == 3


def test_a_launch_in_ray(ray: RayExecutor, cluster: Cluster) -> None:
    assert ray.poll(LAUNCH.handle) == LaunchStatus("unknown")
    ray.submit(LAUNCH)
    ray.submit(LAUNCH)
    ((name, job),) = cluster.jobs.items()
    assert name == LAUNCH.handle
    assert "--nodes 2 --devices 4 --gpus" in job["entrypoint"]
    assert ray.poll(name).state == "waiting"
    job["status"] = "RUNNING"
    assert ray.poll(name) == LaunchStatus("running")
    job |= {"status": "FAILED", "message": "exit code 69", "driver_exit_code": LOST_NODE}
    assert ray.poll(name) == LaunchStatus("ended", "exit code 69", was_evicted=True)


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (500, Unreachable), (503, Unreachable)])
def test_what_ray_refuses(ray: RayExecutor, cluster: Cluster, status: int, kind: type[Exception]) -> None:
    ray.poll = lambda handle: LaunchStatus("unknown")  # type: ignore[method-assign]
    cluster.status = status
    with pytest.raises(kind, match="ValueError"):
        ray.submit(LAUNCH)
