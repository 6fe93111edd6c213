"""Submits jobs without HTTP."""

from pathlib import Path
from typing import Any

from app.contract.model_reference import ModelReference
from app.contract.spec import Spec
from app.jobs import lifecycle
from app.jobs.lifecycle import Submission
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import File, Job
from tests.harness.specs import cpu_plan, make_spec


def submission(spec: Spec, **changes: Any) -> Submission:
    """A submission of a spec."""
    fields: dict[str, Any] = {
        "spec": spec, "plan": cpu_plan(spec, predicted=True), "config": {}, "training_config": {},
        "config_id": None, "user_id": None, "metadata": {}, "priority": 0, "paused": False,
    }  # fmt: skip
    return Submission(**{**fields, **changes})


def submitted(database: Database, spec: Spec | None = None, **changes: Any) -> str:
    """Submits a job on the inline file `file-1`. Returns the job's id."""
    with database.writing() as session:
        if session.get(File, "file-1") is None:
            session.add(
                File(
                    id="file-1", created_at=0.0, filename="f", purpose="fine-tune", bytes=1, sha256="0",
                    format="text", examples=1, inline=True,
                )
            )  # fmt: skip
            session.flush()
        return lifecycle.submit(session, submission(spec or make_spec(), **changes)).id


def succeeded(database: Database, settings: Settings) -> tuple[str, Path]:
    """A job that made a model, whose folder is returned too."""
    job_id = submitted(database)
    with database.writing() as session:
        job = session.get_one(Job, job_id)
        job.status, job.result = "succeeded", {"files": ["config.json"]}
    folder = settings.runs_dir / job_id / "model"
    folder.mkdir(parents=True)
    return job_id, folder


def started_from(database: Database, source: str) -> str:
    """A queued job that starts from the model of another."""
    own = make_spec().model
    model = ModelReference(
        name=f"ft:x:accrue::{source.removeprefix('ftjob-')}", source="job", architecture=own.architecture,
        job_id=source,
    )  # fmt: skip
    return submitted(database, make_spec(model=model))
