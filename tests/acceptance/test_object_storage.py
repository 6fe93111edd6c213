"""Machines that share a database and object storage, but no folder: here, processes with data folders of
their own, which reach both through links that can be cut."""

import hashlib
import importlib.util
import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import LOGGED, submit
from tests.harness.link import Link
from tests.harness.object_storage import S3, s3_server
from tests.harness.postgresql import Server
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue, running

JOBS, LONG = 200, 600
"""The number of jobs that two machines run; the steps of those during which one is disconnected."""


@dataclass
class Machines:
    """A service, and the folders of machines with workers."""

    accrue: Accrue
    folder: Path
    storage: str
    s3: S3 | None = None

    def variables(self, machine: str, **links: int) -> dict[str, str]:
        """The environment of a machine's processes."""
        own = {"ACCRUE_DATA_DIR": str(self.folder / machine), "ACCRUE_OBJECT_STORAGE": self.storage}
        return own if self.s3 is None else {**own, **self.s3.variables(links.get("s3"))}


@contextmanager
def on_files(folder: Path) -> Iterator[Machines]:
    with running(folder / "service", f"sqlite:///{folder}/accrue.db") as accrue:
        yield Machines(accrue, folder, f"file://{folder}/bucket")


@contextmanager
def on_s3(folder: Path, database_url: str | None) -> Iterator[Machines]:
    if not all(map(importlib.util.find_spec, ("s3fs", "moto", "flask"))):
        pytest.skip("needs an S3 server and client: make test-object-storage")
    with (
        s3_server() as s3,
        running(folder / "service", database_url or f"sqlite:///{folder}/accrue.db") as accrue,
    ):
        yield Machines(accrue, folder, s3.url, s3)


@pytest.fixture(params=["files", "s3"])
def machines(request: pytest.FixtureRequest, tmp_path: Path, database_url: str | None) -> Iterator[Machines]:
    (tmp_path / "service").mkdir()
    with on_files(tmp_path) if request.param == "files" else on_s3(tmp_path, database_url) as made:
        made.accrue.env |= made.variables("service")
        made.accrue.serve()
        yield made


def step_of(accrue: Accrue, job_id: str) -> int:
    """The last step that the job has reported."""
    return int((accrue.job(job_id)["progress"] or {}).get("step", 0))


def events_of(accrue: Accrue, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]
    return found


def resumed_at(accrue: Accrue, job_id: str) -> int | None:
    """The step from which the job was resumed last; None if it was not."""
    steps = [event["data"]["step"] for event in events_of(accrue, job_id) if event["type"] == "resumed"]
    return max(steps, default=None)


def is_worked_on(run: Path) -> bool:
    """Whether a trainer is alive in a run directory."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"workers.training" in words and str(run).encode() in words:
                return True
    return False


def runs_on(machines: Machines, machine: str) -> int:
    """The number of jobs that a machine has worked on."""
    return len(list((machines.folder / machine / "runs").glob("ftjob-*")))


def end_of(accrue: Accrue, job_id: str) -> dict[str, Any]:
    """What must be bit-exact of a job's end, as its service hands it out."""
    answer = accrue.http.get(f"{TRAINING}/{job_id}/model")
    assert answer.is_success, answer.text
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        weights = tar.extractfile(f"{tar.getnames()[0].split('/')[0]}/model.safetensors")
        assert weights is not None
        digest = hashlib.sha256(weights.read()).hexdigest()
    lines = accrue.http.get(f"{TRAINING}/{job_id}/log").text.splitlines()
    return {"weights": digest, "log": [[json.loads(line)[name] for name in LOGGED] for line in lines]}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_moves_between_machines_that_share_no_folder(machines: Machines) -> None:
    accrue = machines.accrue
    first = accrue.start("worker", **machines.variables("a"))
    whole = accrue.ended(submit(accrue, max_steps=80, save_every=20))
    assert whole["status"] == "succeeded", whole["error"]
    assert not (machines.folder / "service" / "data" / "runs" / whole["id"]).exists()

    moving = submit(accrue, max_steps=80, save_every=20)
    until(lambda: step_of(accrue, moving) > 25)
    first.terminate()
    assert first.wait(60) == 0
    assert accrue.job(moving)["status"] == "queued"
    second = accrue.start("worker", **machines.variables("b"))
    until(lambda: step_of(accrue, moving) > 45)
    second.terminate()
    assert second.wait(60) == 0
    accrue.start("worker", **machines.variables("a"))
    job = accrue.ended(moving)
    assert (job["status"], job["attempt"]) == ("succeeded", 3), job["error"]
    assert end_of(accrue, moving) == end_of(accrue, whole["id"])
    found = accrue.get(f"/v1/fine_tuning/jobs/{moving}/checkpoints")["data"]
    assert [each["step_number"] for each in found] == [80, 60], found
    for name in (f"{moving}:ckpt-step-60", moving):  # the first is continued by adapters, then they are, too
        continued = accrue.submit(
            model_name=name,
            dataset_config={"texts": ["one", "two"], "max_length": 16},
            training_config={"max_steps": 2, "method": "lora"},
        )
        assert accrue.ended(continued)["status"] == "succeeded", accrue.job(continued)["error"]
        moving = continued
    accrue.start("worker", **machines.variables("c"))
    exported = accrue.post(f"{TRAINING}/{moving}/exports", {"format": "merged"})["id"]
    until(lambda: accrue.get(f"{TRAINING}/{moving}/exports/{exported}")["status"] != "queued", 60)
    until(lambda: accrue.get(f"{TRAINING}/{moving}/exports/{exported}")["status"] != "running", 120)
    answer = accrue.http.get(f"{TRAINING}/{moving}/exports/{exported}/files")
    assert answer.is_success, answer.text
    assert accrue.http.delete(f"{TRAINING}/{moving}").is_success


@pytest.mark.slow
@pytest.mark.postgresql
@pytest.mark.timeout(3600)
def test_a_machine_is_disconnected_while_two_run_many_jobs(
    tmp_path: Path, server: Server, database_url: str
) -> None:
    """Its trainers end before their leases do, and the other machine continues from what it had uploaded.
    When it is connected again, it takes jobs again."""
    (tmp_path / "service").mkdir()
    name = database_url.split("?")[0].rsplit("/", 1)[1]
    with on_s3(tmp_path, database_url) as machines, ExitStack() as stack:
        assert machines.s3 is not None
        accrue = machines.accrue
        accrue.env |= machines.variables("service") | {"ACCRUE_CPU_DEVICES": "2"}
        accrue.serve()
        to_database, to_s3 = links = Link(server.folder / ".s.PGSQL.5432"), Link(machines.s3.port)
        stack.callback(lambda: [link.close() for link in links])
        url = f"postgresql+psycopg://postgres@127.0.0.1:{to_database.port}/{name}"
        linked = machines.variables("a", s3=to_s3.port) | {"ACCRUE_DATABASE_URL": url}
        one = accrue.start("worker", **linked)
        long = [submit(accrue, max_steps=LONG, save_every=25) for _ in range(2)]
        short = [submit(accrue, max_steps=4, save_every=2) for _ in range(JOBS - len(long))]
        for job_id in long:
            until(lambda job_id=job_id: step_of(accrue, job_id) > 60, 120)  # type: ignore[misc]
        accrue.start("worker", **machines.variables("b"))
        time.sleep(5)
        for link in links:
            link.cut()
        for job_id in long:
            until(lambda job_id=job_id: resumed_at(accrue, job_id) is not None, 120)  # type: ignore[misc]
            assert (resumed_at(accrue, job_id) or 0) >= 25
            assert not is_worked_on(machines.folder / "a" / "runs" / job_id)
        until(lambda: sum(accrue.job(each)["status"] == "succeeded" for each in short) >= 20, 600)
        for link in links:
            link.restore()
        before = runs_on(machines, "a")
        until(lambda: runs_on(machines, "a") > before + 5, 300)
        every = [accrue.ended(job_id, 2400) for job_id in (*long, *short)]
        assert [job["error"] for job in every if job["status"] != "succeeded"] == []
        for job_id in (*long, *short):
            kinds = [event["type"] for event in events_of(accrue, job_id)]
            assert kinds.count("succeeded") == 1, kinds
        for same in (long, short):
            first = end_of(accrue, same[0])
            assert [row[0] for row in first["log"]] == list(range(1, len(first["log"]) + 1))
            for job_id in same[1:]:
                assert end_of(accrue, job_id) == first
        assert len(end_of(accrue, long[0])["log"]) == LONG
        assert one.poll() is None
