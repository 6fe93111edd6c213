"""The jobs whose models other jobs start from. They stay as long as an unfinished job starts from them, or a
job that is kept has adapters that were trained on their model."""

from typing import Any

from sqlalchemy import ColumnElement, not_, select

from app.contract.spec import Spec
from app.contract.states import ENDED
from app.errors import Conflict, Unprocessable
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import Job

_SHOWN = 5
_LOOKED_UP = 500
MODEL_DELETED = "model_deleted"
"""The key of a job's result that says that the model was deleted. It is written before the files are deleted,
which may take long."""


def lock(session: Session, spec: Spec) -> None:
    """Keeps the jobs that a spec starts from, and their models, from being deleted until the transaction
    ends. On SQLite, which has one writer, no lock is needed.

    Raises:
        Unprocessable: one of them has been deleted.
    """
    check_available(session, spec, lock=True)


def check_available(session: Session, spec: Spec, *, lock: bool = False) -> None:
    """Checks that the jobs that a spec starts from, and their models, have not been deleted.

    Raises:
        Unprocessable: one of them has been.
    """
    model = spec.model.model_dump(mode="json")
    models = _sources_by_model(model)
    for job_id in sorted(_sources(model)):
        own = select(Job.result).where(Job.id == job_id)
        if lock:
            own = own.with_for_update(read=True, key_share=True)
        row = session.execute(own, execution_options=OF_EVERYONE).one_or_none()
        if row is None or (job_id in models and is_model_deleted(row.result)):
            what = "job" if row is None else "model of the job"
            raise Unprocessable(
                f"{spec.model.name} needs the {what} {job_id}, which has been deleted: choose another model.",
                field="model_name",
            )


def is_model_deleted(result: dict[str, Any] | None) -> bool:
    """Whether the model of a job with that result has been deleted."""
    return bool((result or {}).get(MODEL_DELETED))


def check_unneeded(session: Session, job_id: str) -> None:
    """Checks that no unfinished job starts from a job's model or checkpoint.

    Raises:
        Conflict: some do; the message names the first of those that the session's viewer may see.
    """
    unfinished = select(Job.id, Job.spec["model"]).where(
        Job.status.not_in(ENDED), Job.model_name.startswith("ft:")
    )
    rows = session.execute(unfinished.order_by(Job.id), execution_options=OF_EVERYONE)
    dependent = [each for each, model in rows if job_id in _sources(model)]
    if not dependent:
        return
    own = session.scalars(select(Job.id).where(Job.id.in_(dependent[:_LOOKED_UP])).order_by(Job.id)).all()
    if not own:
        raise Conflict(
            f"The model of {job_id} is still needed by an unfinished job of another key: wait until that job "
            "has ended, or ask an admin."
        )
    some = ", ".join(own[:_SHOWN]) + (", …" if len(own) > _SHOWN else "")
    raise Conflict(f"The model of {job_id} is still needed by unfinished jobs: {some}. Cancel them first.")


def needed(session: Session, expired: ColumnElement[bool]) -> set[str]:
    """The ids of the jobs from whose models unfinished jobs start, or that the adapters of ended jobs need.

    Args:
        expired: which jobs are to be deleted themselves.
    """
    kept = select(Job.status, Job.spec["model"], Job.spec["method"], Job.result).where(
        not_(expired), Job.model_name.startswith("ft:")
    )
    return {
        job_id
        for status, model, method, result in session.execute(kept, execution_options=OF_EVERYONE)
        if status not in ENDED or (_is_adapter(method) and not is_model_deleted(result))
        for job_id in _sources(model)
    }


def _is_adapter(method: dict[str, Any]) -> bool:
    """Whether a job's model consists of adapters alone."""
    return bool(method["lora"]) and not method["lora"]["merge"]


def _sources_by_model(model: dict[str, Any]) -> set[str]:
    """The ids of the jobs whose model, not one of their checkpoints, a model starts from."""
    found = {layer["job_id"] for layer in model.get("layers") or () if layer["folder"] == "model"}
    return found | ({model["job_id"]} if model.get("job_id") else set())


def _sources(model: dict[str, Any]) -> set[str]:
    """The ids of the jobs that trained a model, or parts of it."""
    found = {layer["job_id"] for layer in model.get("layers") or ()}
    return found | ({model["job_id"]} if model.get("job_id") else set())
