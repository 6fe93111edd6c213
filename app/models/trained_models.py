"""Trained models by name: `ft:{base model}:accrue:{suffix}:{the job's own part of its id}`."""

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select

from app.errors import Conflict, NotFound
from app.results.run_files import model_dir
from app.settings import Settings
from app.storage.disk import remove_tree
from app.storage.session import Session
from app.storage.tables import Job

_ORGANISATION = "accrue"
RESULT_FILE = "file-metrics-"


def name_of(job: Job) -> str:
    """What the model of a job is called, once it is there."""
    return f"ft:{job.model_name}:{_ORGANISATION}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')}"


def result_file_of(job: Job) -> str:
    """The id under which a job's step metrics are a file."""
    return f"{RESULT_FILE}{job.id.removeprefix('ftjob-')}"


def job_of_result_file(file_id: str) -> str | None:
    """The job's id; None: it is no result file's."""
    return f"ftjob-{file_id.removeprefix(RESULT_FILE)}" if file_id.startswith(RESULT_FILE) else None


def there(session: Session, settings: Settings) -> Iterator[Job]:
    """The jobs whose model is on disk, newest first."""
    ended = select(Job).where(Job.status == "succeeded").order_by(Job.id.desc())
    for job in session.scalars(ended):
        if has_model(job, settings):
            yield job


def find(session: Session, settings: Settings, name: str) -> Job:
    """The job that made a model.

    Raises:
        NotFound: no model has that name (any more).
    """
    job = session.get(Job, f"ftjob-{name.rpartition(':')[2]}") if name.startswith("ft:") else None
    if job is None or name_of(job) != name or not has_model(job, settings):
        raise NotFound(f"No model has the name {name}: GET /v1/models lists those there are.", field="model")
    return job


def has_model(job: Job, settings: Settings) -> bool:
    """Whether the job made a model that is still there."""
    return job.status == "succeeded" and bool(job.result["files"]) and _folder(job, settings).is_dir()


def remove(session: Session, settings: Settings, name: str) -> None:
    """Deletes a trained model's files; its job stays.

    Raises:
        NotFound, Conflict: no trained model has that name; a base model is not the service's to delete.
    """
    if not name.startswith("ft:"):
        raise Conflict(f"{name} is not a trained model: only trained models can be deleted.")
    folder = _folder(find(session, settings, name), settings)
    remove_tree(folder)


def _folder(job: Job, settings: Settings) -> Path:
    return model_dir(settings, job.id)
