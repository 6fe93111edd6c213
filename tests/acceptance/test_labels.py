"""Jobs that require labels of their worker, with a real service and two workers."""

import json
import time
from pathlib import Path

import pytest

from tests.harness.service import Accrue, running


@pytest.mark.thorough
def test_a_job_runs_on_the_worker_with_the_labels_that_it_requires(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"sample {n}"}) + "\n" for n in range(8)))
    with running(tmp_path) as accrue:
        accrue.serve()
        accrue.start("worker", ACCRUE_WORKER_LABELS="zone=a")
        first = submitted(accrue, data, "zone=a")
        assert accrue.ended(first)["status"] == "succeeded"
        waiting = submitted(accrue, data, "zone=b", "gpu_type=cpu")
        job = accrue.job(waiting)
        assert job["requirements"] == {"zone": "b", "gpu_type": "cpu"}
        assert job["plan"]["warnings"] == [
            "no running worker has the labels zone=b, gpu_type=cpu: the job waits for one"
        ]
        time.sleep(1)
        job = accrue.job(waiting)
        assert (job["status"], job["waiting"]["reason"]) == ("queued", "no_matching_worker")
        assert "no worker has the required labels" in accrue.command("jobs").stdout
        accrue.start("worker", ACCRUE_WORKER_LABELS="zone=b")
        assert accrue.ended(waiting)["status"] == "succeeded"
        shown = accrue.command("gpus").stdout
        assert "zone=a" in shown
        assert "zone=b" in shown


def submitted(accrue: Accrue, data: Path, *labels: str) -> str:
    required = [part for label in labels for part in ("--require", label)]
    told = accrue.command("submit", str(data), "--max-length", "16", "--max-steps", "1", *required, "--json")
    assert told.returncode == 0, told.stderr
    return str(json.loads(told.stdout)["id"])
