"""Trained models by name: `ft:{base model}:accrue:{suffix}:{job id without ftjob-}`."""

from collections.abc import Iterator
from itertools import islice

from sqlalchemy import delete, select
from sqlalchemy.orm import load_only

from app.errors import Conflict, NotFound
from app.jobs import parent_jobs, transitions
from app.models import base_models
from app.results.run_files import model_dir, remove_models
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Export, Job

_ORGANISATION = "accrue"
MAX_LISTED = 1000
_AT_ONCE = 100
_OF_A_MODEL = (
    Job.owner, Job.status, Job.model_name, Job.suffix, Job.result, Job.created_at, Job.finished_at,
)  # fmt: skip
RESULT_FILE = "file-metrics-"


def name_of(job: Job) -> str:
    """The name of a job's model, once the job has succeeded."""
    base = job.model_name.split(":")[1] if job.model_name.startswith("ft:") else job.model_name
    return f"ft:{base}:{_ORGANISATION}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')}"


def result_file_of(job: Job) -> str:
    """The id of the file with a job's step metrics."""
    return f"{RESULT_FILE}{job.id.removeprefix('ftjob-')}"


def job_of_result_file(file_id: str) -> str | None:
    """The id of the job of a result file; None if it is not a result file."""
    return f"ftjob-{file_id.removeprefix(RESULT_FILE)}" if file_id.startswith(RESULT_FILE) else None


def jobs_with_model(session: Session, settings: Settings) -> Iterator[Job]:
    """The newest jobs whose model is on disk, newest first; at most `MAX_LISTED`. Only the columns that tell
    of a model are read."""
    ended = select(Job).where(Job.status == "succeeded").order_by(Job.id.desc())
    ended = ended.options(load_only(*_OF_A_MODEL)).execution_options(yield_per=_AT_ONCE)
    there = (job for job in session.scalars(ended) if has_model(job, settings))
    yield from islice(there, MAX_LISTED)


def find(session: Session, settings: Settings, name: str) -> Job:
    """The job that made a model.

    Args:
        name: the model's name, or the job's id, as in requests to the model.

    Raises:
        NotFound: no model has that name, or the model was deleted.
    """
    job = _made_by(session, name)
    if job is None or not has_model(job, settings):
        raise _unknown(name)
    return job


def _made_by(session: Session, name: str) -> Job | None:
    """The job whose model has that name, or had it before it was deleted; a job's id names its model, too."""
    if name.startswith("ftjob-"):
        job = session.get(Job, name)
        return job if job is not None and job.status == "succeeded" else None
    job = session.get(Job, f"ftjob-{name.rpartition(':')[2]}") if name.startswith("ft:") else None
    return job if job is not None and job.status == "succeeded" and name_of(job) == name else None


def _unknown(name: str) -> NotFound:
    return NotFound(f"No model has the name {name}: GET /v1/models lists all models.", field="model")


def has_model(job: Job, settings: Settings) -> bool:
    """Whether the job made a model that is still there."""
    if job.status != "succeeded" or not job.result["files"] or parent_jobs.is_model_deleted(job.result):
        return False
    return _is_there(job, settings)


def remove(database: Database, settings: Settings, name: str) -> None:
    """Deletes a trained model's files; its job stays. Also deletes what an interrupted deletion has left.

    Raises:
        NotFound: no model has that name.
        Conflict: it is a base model, or a job that has not ended starts from it.
    """
    if name in base_models.local_names(settings):
        raise Conflict(f"{name} is not a trained model: only trained models can be deleted.")
    with database.writing() as session:
        found = _made_by(session, name)
        if found is None or not found.result["files"] or not _is_there(found, settings):
            raise _unknown(name)
        job = transitions.get(session, found.id, lock=True)
        parent_jobs.check_unneeded(session, job.id)
        transitions.change(session, job, result={**job.result, parent_jobs.MODEL_DELETED: True})
        session.execute(delete(Export).where(Export.job_id == job.id))
    remove_models(settings, job.id)


def _is_there(job: Job, settings: Settings) -> bool:
    """Whether files of a job's model are left. Object storage has them until they are deleted: a job succeeds
    only once they are stored."""
    if settings.object_storage is not None:
        return not parent_jobs.is_model_deleted(job.result)
    try:
        return model_dir(settings, job.id).is_dir()
    except stored_files.LinkedFolder:
        return False
