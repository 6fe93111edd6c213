"""A job's checkpoints, according to its trainer's events."""

from dataclasses import dataclass

from sqlalchemy import select

from app.results.series import Evaluation, evaluations
from app.settings import Settings
from app.storage.session import Session
from app.storage.stored_files import checkpoint_names
from app.storage.tables import Job, JobEvent, StepMetric


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk."""

    id: str
    name: str
    """Of its folder."""
    created_at: int
    step: int
    train_loss: float | None
    evaluation: Evaluation


def list_checkpoints(session: Session, settings: Settings, job: Job) -> list[Checkpoint]:
    """The checkpoints on disk, newest first; of each step, the newest."""
    there = checkpoint_names(settings, job.id)
    events = session.scalars(
        select(JobEvent)
        .where(
            JobEvent.job_id == job.id,
            JobEvent.type == "checkpoint",
            JobEvent.data["name"].as_string().in_(there),
        )
        .order_by(JobEvent.id.desc())
    ).all()
    by_step: dict[int, JobEvent] = {}
    for event in events:
        by_step.setdefault(event.data["step"], event)
    by_name = {event.data["name"]: event for event in by_step.values()}
    steps = [event.data["step"] for event in by_name.values()]
    evaluated, trained = evaluations(session, job.id, steps), _losses(session, job, steps)
    return [
        Checkpoint(
            id=event.id.replace("ftevent-", "ftckpt-", 1),
            name=event.data["name"],
            created_at=int(event.created_at),
            step=(step := event.data["step"]),
            train_loss=trained.get(step),
            evaluation=evaluated.get(step, Evaluation(None, None)),
        )
        for event in sorted(by_name.values(), key=lambda event: event.id, reverse=True)
    ]


def _losses(session: Session, job: Job, steps: list[int]) -> dict[int, float]:
    rows = session.execute(
        select(StepMetric.step, StepMetric.loss).where(
            StepMetric.job_id == job.id, StepMetric.step.in_(steps)
        )
    )
    return {row.step: row.loss for row in rows}
