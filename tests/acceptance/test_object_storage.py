"""Machines that share a database and object storage, but no folder: here, processes with data folders of
their own, which reach both through links that can be cut."""

import hashlib
import importlib.util
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.faults import LOGGED, submit
from tests.harness.object_storage import S3, s3_server
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue, running

LONG = 400
"""Steps of a job during which a machine is disconnected."""


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


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_job_moves_between_machines_that_share_no_folder(machines: Machines) -> None:
    accrue = machines.accrue
    first = accrue.start("worker", **machines.variables("a"))
    whole = accrue.ended(submit(accrue, max_steps=80, save_every=20))
    assert whole["status"] == "succeeded", whole["error"]
    assert not (machines.folder / "service" / "data" / "runs" / whole["id"]).exists()

    moving = submit(accrue, max_steps=80, save_every=20)
    until(lambda: (machines.accrue.job(moving)["progress"] or {}).get("step", 0) > 25)
    first.terminate()
    assert first.wait(60) == 0
    assert accrue.job(moving)["status"] == "queued"
    second = accrue.start("worker", **machines.variables("b"))
    until(lambda: (machines.accrue.job(moving)["progress"] or {}).get("step", 0) > 45)
    second.terminate()
    assert second.wait(60) == 0
    accrue.start("worker", **machines.variables("a"))
    job = accrue.ended(moving)
    assert (job["status"], job["attempt"]) == ("succeeded", 3), job["error"]
    assert end_of(accrue, moving) == end_of(accrue, whole["id"])
    found = accrue.get(f"/v1/fine_tuning/jobs/{moving}/checkpoints")["data"]
    assert [each["step_number"] for each in found] == [80, 60], found
    assert accrue.http.delete(f"{TRAINING}/{moving}").is_success
