"""Statistics and performance figures, computed from the rows that workers wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import BindParameter, Row, ScalarSelect, Select, bindparam, case, func, select
from sqlalchemy.orm import aliased

from app.contract.spec import Spec
from app.contract.states import ENDED
from app.planning.devices import Device
from app.statistics.schemas import (
    ConfigurationStatistics,
    CostByAccumulationSteps,
    JobPerformance,
    JobStatistics,
    RankFigures,
    Statistics,
)
from app.storage.session import Session
from app.storage.tables import Configuration, Job, JobEvent, Measurement, StepMetric

_SECONDS = (
    StepMetric.data_seconds
    + StepMetric.forward_backward_seconds
    + StepMetric.optimizer_seconds
    + func.coalesce(StepMetric.synchronise_seconds, 0.0)
)

_JOB_IDS: BindParameter[list[str]] = bindparam("job_ids", expanding=True)


@dataclass(frozen=True)
class Speed:
    """What a finished job measured."""

    job_id: str
    samples_per_second: float
    tokens_per_sample: float
    is_of_same_file: bool


def speed(session: Session, spec: Spec, device: Device) -> Speed | None:
    """The speed of the newest finished job that trained the same model in the same way on the same kind of
    device.

    Jobs on the same data are preferred.
    """
    finished = select(Job.id, Job.spec, Job.plan).where(
        Job.model_name == spec.model.name,
        Job.status == "succeeded",
        Job.device.startswith(device.kind),
        Job.result["tuning"].as_string().is_(None),
    )
    wanted = {name: spec.model_dump(mode="json")[name] for name in _DECIDE_SPEED}
    for is_same, each in ((True, finished.where(Job.file_id == spec.data.file_id)), (False, finished)):
        for job in session.execute(each.order_by(Job.id.desc()).limit(_MAX_JOBS_SEARCHED)):
            if _is_comparable(job.spec, job.plan, wanted, spec, device):
                measured = _speed_of(session, job.id, is_same_file=is_same)
                if measured is not None:
                    return measured
    return None


_DECIDE_SPEED = (
    "model", "method", "attention", "compile", "gradient_checkpointing", "precision", "freeze", "objective",
)  # fmt: skip
"""Fields of a spec that decide how long a sample takes, besides its length and the device."""

_MAX_JOBS_SEARCHED = 20
"""The maximum number of jobs searched for one that trained in the same way."""


def _is_comparable(
    other: dict[str, Any], plan: dict[str, Any], wanted: dict[str, Any], spec: Spec, device: Device
) -> bool:
    data = ("max_length", "overlength", "packing")
    return (
        all(other.get(name) == value for name, value in wanted.items())
        and all(other["data"][name] == getattr(spec.data, name) for name in data)
        and len(plan["devices"]) == 1
        and other.get("strategy") != "independent"
        and plan["devices"][0].get("name") in (None, device.name)
    )


_MAX_STEPS = 1000
"""The newest steps of a job from which its speed is computed: submissions wait for it."""

_MIN_STEPS = 10
"""A job with fewer steps after its first one, which takes longer, has measured no speed."""


def _speed_of(session: Session, job_id: str, *, is_same_file: bool) -> Speed | None:
    """What a job measured; None if it made too few steps."""
    seconds_of_step = _SECONDS.label("seconds")
    newest = (
        select(StepMetric.samples, StepMetric.input_tokens, seconds_of_step)
        .where(StepMetric.job_id == job_id, StepMetric.step > 1)
        .order_by(StepMetric.step.desc())
        .limit(_MAX_STEPS)
        .subquery()
    )
    columns = (newest.c.samples, newest.c.input_tokens, newest.c.seconds)
    count, samples, tokens, seconds = session.execute(select(func.count(), *map(func.sum, columns))).one()
    if count < _MIN_STEPS or not seconds or not samples:
        return None
    return Speed(job_id, samples / seconds, tokens / samples, is_same_file)


def of_job(session: Session, job: Job) -> JobStatistics:
    """A job's figures."""
    return JobStatistics(
        training_id=job.id,
        status=job.status,
        stats=_statistics(
            session.execute(_figures_of_jobs(), {"job_ids": [job.id]}).one(),
            job.progress.get("skipped", 0),
            job.spec,
            job.plan,
        ).model_copy(update={"prediction_error": _prediction_error(session, job), "ranks": _ranks(job)}),
    )


def _ranks(job: Job) -> list[RankFigures] | None:
    ranks = job.progress.get("ranks")
    return ranks and [RankFigures.model_validate(rank) for rank in ranks]


_MOST_LISTED = 100


def of_configuration(session: Session, configuration: Configuration) -> ConfigurationStatistics:
    """The figures of a configuration's jobs, together and each."""
    own = Job.config_id == configuration.id
    newest = session.scalars(select(Job).where(own).order_by(Job.id.desc()).limit(_MOST_LISTED)).all()
    active = session.scalar(select(Job.id).where(own, Job.status.not_in(ENDED)).limit(1)) is not None
    skipped = session.scalar(select(func.sum(Job.progress["skipped"].as_integer())).where(own))
    return ConfigurationStatistics(
        config_id=configuration.id,
        status="unused" if not newest else "active" if active else "ended",
        stats=_statistics(
            session.execute(_figures_of_configuration(), {"config_id": configuration.id}).one(),
            skipped or 0,
            {"effective_batch_size": configuration.effective_batch_size},
            {"accumulation_steps": configuration.given.get("accumulation_steps")},
        ),
        jobs=[of_job(session, job) for job in reversed(newest)],
    )


_SAME_SIZE_RATIO = 0.8, 1.25
"""Two micro-batches count as equally large if the ratio of their tokens is in this range."""


def performances(session: Session, jobs: Sequence[Job]) -> list[JobPerformance]:
    """The measured performance of jobs. Accumulation is compared with single micro-batches of the same size,
    in the same job or in another of these jobs that trained the same model in the same way on the same
    device."""
    single = [job for job in jobs if job.plan["accumulation_steps"] == 1]
    return [
        performance(session, job, [other.id for other in single if _trains_like(other, job)]) for job in jobs
    ]


def _trains_like(job: Job, other: Job) -> bool:
    same = ("model", "method", "attention", "compile", "gradient_checkpointing")
    return (
        all(job.spec[name] == other.spec[name] for name in same)
        and job.plan["precision"] == other.plan["precision"]
        and job.device == other.device
    )


def performance(session: Session, job: Job, alike: Sequence[str] = ()) -> JobPerformance:
    """Where a job's time went: seconds and shares by part of the window.

    Args:
        alike: ids of comparable jobs that may have measured windows of a single micro-batch.
    """
    row = session.execute(
        select(
            func.sum(StepMetric.data_seconds),
            func.sum(StepMetric.forward_backward_seconds),
            func.sum(StepMetric.optimizer_seconds),
            func.sum(StepMetric.input_tokens),
            func.sum(StepMetric.padded_tokens),
            func.sum(StepMetric.samples),
            func.sum(StepMetric.synchronise_seconds),
        ).where(StepMetric.job_id == job.id)
    ).one()
    data, computing, optimizer, tokens, padded, samples, synchronise = (value or 0 for value in row)
    seconds = {
        "data": data,
        "forward_backward": computing,
        "optimizer": optimizer,
        "synchronisation": synchronise,
    }
    whole = sum(seconds.values())
    return JobPerformance(
        training_id=job.id,
        status=job.status,
        tokens_per_second=tokens / whole if whole else None,
        samples_per_second=samples / whole if whole else None,
        seconds=seconds,
        share={name: value / whole for name, value in seconds.items()} if whole else {},
        padding_share=1 - tokens / padded if padded else None,
        by_accumulation_steps=_by_steps(session, job),
        accumulation_overhead=_overhead(session, job, alike),
    )


def _by_steps(session: Session, job: Job) -> list[CostByAccumulationSteps]:
    """The cost of a window by its number of micro-batches."""
    steps = StepMetric.gradient_accumulation_steps
    rows = session.execute(
        select(
            steps, func.count(), func.avg(_SECONDS), func.sum(StepMetric.forward_backward_seconds),
            func.sum(StepMetric.padded_tokens), func.sum(StepMetric.optimizer_seconds), func.sum(_SECONDS),
        ).where(StepMetric.job_id == job.id).group_by(steps).order_by(steps)
    )  # fmt: skip
    return [
        CostByAccumulationSteps(
            accumulation_steps=count,
            windows=windows,
            seconds_per_window=each,
            seconds_per_micro_batch=computing / (windows * max(1, count)),
            padded_tokens_per_second=padded / computing if computing else None,
            optimizer_share=optimizer / whole if whole else 0.0,
        )
        for count, windows, each, computing, padded, optimizer, whole in rows
    ]


def _overhead(session: Session, job: Job, alike: Sequence[str]) -> float | None:
    """How much longer a token takes in windows of several micro-batches than in windows of one micro-batch of
    the same size, as a share; None unless both were measured."""
    several = StepMetric.gradient_accumulation_steps > 1
    cost = func.sum(StepMetric.forward_backward_seconds) / func.sum(StepMetric.padded_tokens)
    usual = select(func.avg(StepMetric.largest_tokens), cost)
    size, accumulating = session.execute(usual.where(StepMetric.job_id == job.id, several)).one()
    if size is None:
        return None
    low, high = (ratio * float(size) for ratio in _SAME_SIZE_RATIO)
    single = select(cost).where(
        StepMetric.job_id.in_([job.id, *alike]),
        StepMetric.gradient_accumulation_steps == 1,
        StepMetric.largest_tokens.between(low, high),
    )
    alone = session.scalar(single)
    return float(accumulating / alone - 1) if alone else None


def _statistics(figures: Row[Any], skipped: int, spec: dict[str, Any], plan: dict[str, Any]) -> Statistics:
    return Statistics(
        accumulation_steps=figures.accumulation_steps or plan.get("accumulation_steps"),
        effective_batch_size=spec.get("effective_batch_size"),
        steps=figures.steps,
        micro_steps=figures.micro_steps or 0,
        skipped=skipped,
        samples=figures.samples or 0,
        tokens=figures.tokens or 0,
        total_loss=figures.total_loss,
        first_loss=figures.first_loss,
        final_loss=figures.final_loss,
        loss_mean=figures.loss_mean,
        loss_variance=None if figures.loss_variance is None else max(0.0, figures.loss_variance),
        avg_gradient_norm=figures.grad_norm,
        avg_memory_usage_gb=_two_decimals(figures.memory),
        peak_memory_gb=_two_decimals(figures.peak),
        avg_accumulation_time=figures.accumulation_time,
        tokens_per_second=figures.input_tokens / figures.seconds if figures.seconds else None,
        samples_per_second=figures.samples / figures.seconds if figures.seconds else None,
        padding_share=1 - figures.input_tokens / figures.padded_tokens if figures.padded_tokens else None,
        noise_scale=figures.noise_scale,
        oom_recoveries=figures.oom_recoveries,
        prediction_error=None,
    )


_NEGLIGIBLE = 1e-100
"""Losses below this count as 0: PostgreSQL rejects squares that underflow."""
_LOSS = case((func.abs(StepMetric.loss) < _NEGLIGIBLE, 0.0), else_=StepMetric.loss)


def _figures(job_ids: Any) -> Select[Any]:
    """One query over all steps of the given jobs, so that its figures are consistent with each other.

    Args:
        job_ids: a list of ids, or a query for them.
    """
    mean = func.avg(_LOSS)
    recoveries = select(func.count()).where(JobEvent.job_id.in_(job_ids), JobEvent.type == "out_of_memory")
    return (
        select(
            func.count().label("steps"),
            func.sum(StepMetric.samples).label("samples"),
            func.sum(StepMetric.tokens).label("tokens"),
            func.sum(StepMetric.input_tokens).label("input_tokens"),
            func.sum(StepMetric.padded_tokens).label("padded_tokens"),
            func.sum(StepMetric.loss).label("total_loss"),
            mean.label("loss_mean"),
            (func.avg(_LOSS * _LOSS) - mean * mean).label("loss_variance"),
            func.avg(StepMetric.gradient_accumulation_steps).label("accumulation_steps"),
            func.avg(StepMetric.grad_norm).label("grad_norm"),
            func.avg(StepMetric.memory_gb).label("memory"),
            func.max(StepMetric.peak_gb).label("peak"),
            func.avg(StepMetric.forward_backward_seconds).label("accumulation_time"),
            func.sum(_SECONDS).label("seconds"),
            _micro_steps(job_ids).label("micro_steps"),
            _loss_at(func.min, job_ids).label("first_loss"),
            _loss_at(func.max, job_ids).label("final_loss"),
            _noise_scale(job_ids).label("noise_scale"),
            recoveries.scalar_subquery().label("oom_recoveries"),
        )
        .where(StepMetric.job_id.in_(job_ids))
        .select_from(StepMetric)
    )


def _micro_steps(job_ids: Any) -> ScalarSelect[Any]:
    steps = aliased(StepMetric)
    each = (
        select(func.max(steps.micro_step).label("last"))
        .where(steps.job_id.in_(job_ids))
        .group_by(steps.job_id)
    ).subquery()
    return select(func.sum(each.c.last)).scalar_subquery()


def _loss_at(which: Any, job_ids: Any) -> ScalarSelect[Any]:
    """The loss of the first or the last step, averaged over the jobs."""
    steps, those = aliased(StepMetric), aliased(StepMetric)
    at = (
        select(those.job_id, which(those.step).label("step"))
        .where(those.job_id.in_(job_ids))
        .group_by(those.job_id)
        .subquery()
    )
    loss = select(func.avg(steps.loss)).join(at, (at.c.job_id == steps.job_id) & (at.c.step == steps.step))
    return loss.scalar_subquery()


def _noise_scale(job_ids: Any) -> ScalarSelect[Any]:
    """The last measured noise scale of these jobs."""
    steps = aliased(StepMetric)
    measured = select(steps.noise_scale).where(steps.job_id.in_(job_ids), steps.noise_scale.is_not(None))
    return measured.order_by(steps.job_id.desc(), steps.step.desc()).limit(1).scalar_subquery()


@cache
def _figures_of_jobs() -> Select[Any]:
    """Built once, since building the query takes longer than running it."""
    return _figures(_JOB_IDS)


@cache
def _figures_of_configuration() -> Select[Any]:
    return _figures(select(Job.id).where(Job.config_id == bindparam("config_id")))


def _prediction_error(session: Session, job: Job) -> float | None:
    """(predicted - measured) / measured peak memory of the largest micro-batch. It is taken from the newest
    attempt that has ended and ran long enough to measure it."""
    peaks = select(Measurement.predicted_bytes, Measurement.measured_bytes)
    of_runs = peaks.where(Measurement.job_id == job.id, Measurement.kind == "run")
    newest = of_runs.order_by(Measurement.attempt.desc(), Measurement.tokens.desc()).limit(1)
    row = session.execute(newest).one_or_none()
    return None if row is None else (row[0] - row[1]) / row[1]


def _two_decimals(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
