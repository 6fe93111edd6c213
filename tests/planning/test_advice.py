"""Advice on a job, given only if the job's measurements support it."""

import socket
from dataclasses import replace
from typing import Any

import pytest

from app.devices import gpus, live_workers
from app.devices.gpus import DetectedGpu
from app.planning import job_advice
from app.planning.advice import Figures, advise
from app.storage.database import Database
from app.storage.tables import Job, Worker
from tests.harness.submissions import submitted

GIB = 2**30
FINE = Figures(
    padding_share=0.02, data_share=0.01, optimizer_share=0.05, micro_batches_per_step=4.0, skipped=0,
    size_is_planned=True, on_gpu=True, peak_bytes=7.0 * GIB, limit_bytes=10 * GIB, micro_batch=8,
    gradient_checkpointing=False, clips_each_micro_batch=False, clipping=1.0, effective_batch=32,
    samples=5_000,
)  # fmt: skip


def test_a_job_that_runs_well_gets_no_advice() -> None:
    assert advise(FINE) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"padding_share": 0.3}, "30% of the work went into padding: set packing"),
        ({"padding_share": 0.3, "size_is_planned": False}, "leave the split to the plan"),
        ({"data_share": 0.4}, "waited for data 40% of the time"),
        ({"load": 0.2}, "GPU is busy 20% of the time"),
        ({"optimizer_share": 0.16}, "optimizer takes 16% of a window"),
        ({"skipped": 3}, "3 windows were skipped"),
        ({"peak_bytes": 3.0 * GIB}, "30% of the memory that may be used: larger micro-batches would fit"),
        ({"micro_batches_per_step": 12.0}, "12 micro-batches: if memory allows"),
        ({"micro_batches_per_step": 12.0, "peak_bytes": 3.0 * GIB}, "larger micro-batches would keep"),
        (
            {"micro_batches_per_step": 32.0, "peak_bytes": 9.0 * GIB, "micro_batch": 1},
            "with gradient_checkpointing, more samples fit at once",
        ),
        ({"gradient_checkpointing": True, "peak_bytes": 3.0 * GIB}, "Without gradient_checkpointing"),
        ({"clips_each_micro_batch": True}, "clipped to 1 after each of a window's 4 micro-batches"),
        ({"effective_batch": 500}, "is 10.0% of the data"),
        ({"effective_batch": 32, "samples": 100_000}, "is 0.03% of the data"),
    ],
)
def test_each_advice_contains_its_number(changes: dict[str, Any], said: str) -> None:
    [sentence] = advise(replace(FINE, **changes))
    assert said in sentence


def test_there_is_no_advice_about_cpu_memory() -> None:
    assert advise(replace(FINE, on_gpu=False, peak_bytes=1.0 * GIB)) == []


@pytest.mark.parametrize(("hostname", "load"), [(socket.gethostname(), 0.25), ("another-machine", None)])
def test_the_load_is_that_of_the_jobs_own_machine(
    database: Database, monkeypatch: pytest.MonkeyPatch, hostname: str, load: float | None
) -> None:
    monkeypatch.setattr(gpus, "detected", lambda: (DetectedGpu(0, "GPU-1", "L4", 24 * GIB, 0, 0.25, 40.0),))
    job_id = submitted(database)
    with database.writing() as session:
        worker = Worker(id="worker-1", hostname=hostname, started_at=None, devices=[], running=[], labels={})
        live_workers.beat(session, worker)
        job = session.get_one(Job, job_id)
        job.status, job.device, job.worker_id = "running", "cuda:0", "worker-1"
    with database.reading() as session:
        assert job_advice._load(session, session.get_one(Job, job_id)) == load
