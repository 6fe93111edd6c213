"""The read side: figures out of the rows that workers wrote."""

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from app.models import Configuration, Job, JobEvent, StepMetric
from app.schemas.statistics import (
    ConfigurationStatistics,
    JobPerformance,
    JobStatistics,
    Statistics,
)
from app.schemas.training import ENDED

_SECONDS = StepMetric.data_seconds + StepMetric.forward_backward_seconds + StepMetric.optimizer_seconds


@dataclass(frozen=True)
class Speed:
    """What a finished job measured."""

    job_id: str
    samples_per_second: float
    tokens_per_sample: float


def speed(session: Session, model_name: str, kind: Literal["cpu", "cuda"], file_id: str) -> Speed | None:
    """How fast the newest finished job with a model went on such a device; first those on the same data."""
    jobs = select(Job).where(
        Job.model_name == model_name,
        Job.status == "succeeded",
        Job.device.startswith(kind),
        Job.result["tuning"].as_string().is_(None),
    )
    newest = (
        session.scalars(each.order_by(Job.id.desc()).limit(1)).one_or_none()
        for each in (jobs.where(Job.file_id == file_id), jobs)
    )
    job = next((each for each in newest if each is not None), None)
    if job is None:
        return None
    samples, tokens, seconds = session.execute(
        select(func.sum(StepMetric.samples), func.sum(StepMetric.input_tokens), func.sum(_SECONDS)).where(
            StepMetric.job_id == job.id
        )
    ).one()
    return Speed(job.id, samples / seconds, tokens / samples) if seconds else None


def of_job(session: Session, job: Job) -> JobStatistics:
    """A job's figures."""
    return JobStatistics(
        training_id=job.id, status=job.status, stats=_statistics(session, [job.id], job.spec, job.plan)
    )


def of_configuration(session: Session, configuration: Configuration) -> ConfigurationStatistics:
    """The figures of a configuration's jobs, together and each."""
    jobs = session.scalars(select(Job).where(Job.config_id == configuration.id).order_by(Job.id)).all()
    active = any(job.status not in ENDED for job in jobs)
    return ConfigurationStatistics(
        config_id=configuration.id,
        status="unused" if not jobs else "active" if active else "ended",
        stats=_statistics(
            session,
            [job.id for job in jobs],
            {"effective_batch_size": configuration.effective_batch_size},
            {"accumulation_steps": configuration.given.get("accumulation_steps")},
        ),
        jobs=[of_job(session, job) for job in jobs],
    )


def performance(session: Session, job: Job) -> JobPerformance:
    """Where a job's time went: seconds and shares by part of the window."""
    row = session.execute(
        select(
            func.sum(StepMetric.data_seconds),
            func.sum(StepMetric.forward_backward_seconds),
            func.sum(StepMetric.optimizer_seconds),
            func.sum(StepMetric.input_tokens),
            func.sum(StepMetric.padded_tokens),
            func.sum(StepMetric.samples),
        ).where(StepMetric.job_id == job.id)
    ).one()
    data, computing, optimizer, tokens, padded, samples = (value or 0 for value in row)
    seconds = {"data": data, "forward_backward": computing, "optimizer": optimizer, "synchronisation": 0.0}
    whole = sum(seconds.values())
    return JobPerformance(
        training_id=job.id,
        status=job.status,
        tokens_per_second=tokens / whole if whole else None,
        samples_per_second=samples / whole if whole else None,
        seconds=seconds,
        share={name: value / whole for name, value in seconds.items()} if whole else {},
        padding_share=1 - tokens / padded if padded else None,
    )


def _statistics(
    session: Session, job_ids: list[str], spec: dict[str, Any], plan: dict[str, Any]
) -> Statistics:
    figures = _figures(session, job_ids)
    micro_steps = session.scalars(
        select(func.max(StepMetric.micro_step))
        .where(StepMetric.job_id.in_(job_ids))
        .group_by(StepMetric.job_id)
    )
    progress = session.scalars(select(Job.progress).where(Job.id.in_(job_ids)))
    skipped = sum(each.get("skipped", 0) for each in progress)
    return Statistics(
        accumulation_steps=figures.accumulation_steps or plan.get("accumulation_steps"),
        effective_batch_size=spec.get("effective_batch_size"),
        steps=figures.steps,
        micro_steps=sum(micro_steps),
        skipped=skipped,
        samples=figures.samples or 0,
        tokens=figures.tokens or 0,
        total_loss=figures.total_loss,
        first_loss=_loss_at(session, job_ids, func.min),
        final_loss=_loss_at(session, job_ids, func.max),
        loss_mean=figures.loss_mean,
        loss_variance=None if figures.loss_variance is None else max(0.0, figures.loss_variance),
        avg_gradient_norm=figures.grad_norm,
        avg_memory_usage_gb=_two_decimals(figures.memory),
        peak_memory_gb=_two_decimals(figures.peak),
        avg_accumulation_time=figures.accumulation_time,
        tokens_per_second=figures.input_tokens / figures.seconds if figures.seconds else None,
        samples_per_second=figures.samples / figures.seconds if figures.seconds else None,
        padding_share=1 - figures.input_tokens / figures.padded_tokens if figures.padded_tokens else None,
        noise_scale=_noise_scale(session, job_ids),
        oom_recoveries=_count(
            session,
            select(func.count())
            .select_from(JobEvent)
            .where(JobEvent.job_id.in_(job_ids), JobEvent.type == "out_of_memory"),
        ),
        prediction_error=_prediction_error(figures.peak, plan),
    )


def _noise_scale(session: Session, job_ids: list[str]) -> float | None:
    """As it was last measured in one of the jobs."""
    return session.scalar(
        select(StepMetric.noise_scale)
        .where(StepMetric.job_id.in_(job_ids), StepMetric.noise_scale.is_not(None))
        .order_by(StepMetric.job_id.desc(), StepMetric.step.desc())
        .limit(1)
    )


def _figures(session: Session, job_ids: list[str]) -> Any:
    """Sums and averages over every step of some jobs: one row."""
    mean = func.avg(StepMetric.loss)
    rows = (
        select(
            func.count().label("steps"),
            func.sum(StepMetric.samples).label("samples"),
            func.sum(StepMetric.tokens).label("tokens"),
            func.sum(StepMetric.input_tokens).label("input_tokens"),
            func.sum(StepMetric.padded_tokens).label("padded_tokens"),
            func.sum(StepMetric.loss).label("total_loss"),
            mean.label("loss_mean"),
            (func.avg(StepMetric.loss * StepMetric.loss) - mean * mean).label("loss_variance"),
            func.avg(StepMetric.gradient_accumulation_steps).label("accumulation_steps"),
            func.avg(StepMetric.grad_norm).label("grad_norm"),
            func.avg(StepMetric.memory_gb).label("memory"),
            func.max(StepMetric.peak_gb).label("peak"),
            func.avg(StepMetric.forward_backward_seconds).label("accumulation_time"),
            func.sum(_SECONDS).label("seconds"),
        )
        .where(StepMetric.job_id.in_(job_ids))
        .select_from(StepMetric)
    )
    return session.execute(rows).one()


def _prediction_error(peak_gb: float | None, plan: dict[str, Any]) -> float | None:
    """(predicted - measured) / measured peak memory of the process, of one job's own plan."""
    if not peak_gb or plan.get("predicted", True):
        return None
    measured = peak_gb * 2**30
    return float((plan["devices"][0]["predicted_peak_bytes"] - measured) / measured)


def _loss_at(session: Session, job_ids: list[str], which: Any) -> float | None:
    """The loss of the first or the last step, averaged over the jobs."""
    at = (
        select(StepMetric.job_id, which(StepMetric.step).label("step"))
        .where(StepMetric.job_id.in_(job_ids))
        .group_by(StepMetric.job_id)
        .subquery()
    )
    return session.scalar(
        select(func.avg(StepMetric.loss)).join(
            at, (at.c.job_id == StepMetric.job_id) & (at.c.step == StepMetric.step)
        )
    )


def _count(session: Session, query: Select[Any]) -> int:
    return session.scalar(query) or 0


def _two_decimals(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
