"""Stores what a job has measured (memory, speed, micro-batch sizes), which improves later plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError

from app.contract.reports import Tuning
from app.contract.spec import Spec
from app.jobs import transitions
from app.memory_profiles import measurements, profiles
from app.storage.database import is_unavailable
from app.storage.session import Session
from workers.leases import Running

log = structlog.get_logger("accrue.worker")


def store_run(session: Session, running: Running) -> None:
    """Stores the memory and speed of an attempt that has ended, unless it ran on several devices, or as
    several replicas."""
    if len(running.devices) > 1:
        return
    with _harmless_failure(session, running):
        job = transitions.get(session, running.fence.job_id)
        spec = Spec.model_validate(job.spec)
        if job.attempt == running.fence.attempt and spec.strategy != "independent":
            about = profiles.measured_job(session, job, spec, running.devices[0])
            measurements.note_run(session, about)


def store_tuning(session: Session, running: Running, tuning: dict[str, Any]) -> None:
    """Stores what a trainer measured when it tried several micro-batch sizes, unless on several devices."""
    if len(running.devices) > 1:
        return
    with _harmless_failure(session, running):
        job = transitions.get(session, running.fence.job_id)
        about = profiles.measured_job(session, job, Spec.model_validate(job.spec), running.devices[0])
        measurements.record_tuning(session, about, Tuning.model_validate(tuning))


@contextmanager
def _harmless_failure(session: Session, running: Running) -> Iterator[None]:
    """Logs and undoes a failure: it costs a measurement and never changes how the job ends."""
    try:
        with session.begin_nested():
            yield
    except Exception as error:
        if isinstance(error, DBAPIError) and is_unavailable(error):
            raise
        log.exception("could not store what the job measured", job=running.fence.job_id)
