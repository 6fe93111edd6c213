"""Submits jobs without HTTP."""

from typing import Any

from app.contract.spec import Spec
from app.jobs import lifecycle
from app.jobs.lifecycle import Submission
from app.storage.database import Database
from app.storage.tables import File
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
