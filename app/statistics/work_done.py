"""How much work finished jobs did and how long it took, from which the duration of others is predicted."""

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any

from sqlalchemy import Select, func, select

from app.contract.plan import Plan
from app.contract.spec import RunPrecision, Spec
from app.planning.devices import Device
from app.planning.duration import MeasuredWork, work_of
from app.planning.memory import lora_parameters
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import Job, JobTotals, StepMetric

_MOST_JOBS, _MOST_STEPS = 20, 300
_LEAST_STEPS = 5


@dataclass(frozen=True)
class DeviceHistory:
    """What jobs did on one kind of device."""

    done: tuple[MeasuredWork, ...]
    overhead_seconds: float | None
    """The median time of a job outside its windows: start, certificate, evaluation and saving."""


def work_done(session: Session, device: Device, precision: RunPrecision) -> DeviceHistory:
    """The work of the newest finished jobs that trained on one device of this kind, in this precision.

    It includes the jobs of all keys, since only the device's speed is derived from them.
    """
    finished = (
        select(Job.id, Job.spec, Job.plan, JobTotals.seconds, JobTotals.device_seconds)
        .join(JobTotals, JobTotals.job_id == Job.id)
        .where(Job.status == "succeeded", Job.device.startswith(device.kind), JobTotals.steps >= _LEAST_STEPS)
        .order_by(Job.id.desc())
        .limit(_MOST_JOBS)
    )
    done: list[MeasuredWork] = []
    overheads: list[float] = []
    for job in session.execute(finished, execution_options=OF_EVERYONE):
        plan, spec = Plan.model_validate(job.plan), Spec.model_validate(job.spec)
        alone = len(plan.ranks) == 1 and plan.ranks[0].name in (None, device.name)
        if not alone or plan.precision != precision:
            continue
        overheads.append(max(0.0, job.device_seconds - job.seconds))
        own = _done(session, job.id, spec)
        done += [own] if own is not None else []
    return DeviceHistory(tuple(done), median(overheads) if overheads else None)


def _done(session: Session, job_id: str, spec: Spec) -> MeasuredWork | None:
    newest = (
        select(StepMetric)
        .where(StepMetric.job_id == job_id)
        .order_by(StepMetric.step.desc())
        .limit(_MOST_STEPS)
        .subquery()
    )
    sums = session.execute(
        select(
            func.count(), func.sum(newest.c.samples), func.sum(newest.c.padded_tokens),
            func.sum(newest.c.gradient_accumulation_steps),
            func.sum(newest.c.forward_backward_seconds + newest.c.data_seconds),
            func.sum(newest.c.optimizer_seconds),
        ),
        execution_options=OF_EVERYONE,
    ).one()  # fmt: skip
    steps, samples, tokens, micro_batches, seconds, updating = sums
    measured = (steps, samples, tokens, micro_batches, seconds)
    if not all(each is not None and 0 < each < inf for each in measured):
        return None
    architecture, lora = spec.model.architecture, spec.method.lora
    work = work_of(
        architecture,
        tokens=tokens,
        length=tokens / samples,
        micro_batches=micro_batches,
        steps=steps,
        adapters=lora is not None,
        trained=None if lora is None else lora_parameters(architecture, lora),
        checkpointing=spec.gradient_checkpointing,
    )
    return MeasuredWork(work, seconds, updating or 0.0)


def tokens_per_sample(session: Session, file_id: str, vocabulary: int, max_length: int) -> float | None:
    """The mean length of a file's samples in tokens, as an earlier job with such a tokenizer counted them;
    None if there was none."""
    jobs: Select[Any] = (
        select(Job.id)
        .where(
            Job.file_id == file_id,
            Job.spec["model"]["architecture"]["vocabulary"].as_integer() == vocabulary,
            Job.spec["data"]["max_length"].as_integer() == max_length,
        )
        .order_by(Job.id.desc())
        .limit(_MOST_JOBS)
    )
    for job_id in session.scalars(jobs):
        newest = (
            select(StepMetric.samples, StepMetric.input_tokens)
            .where(StepMetric.job_id == job_id)
            .order_by(StepMetric.step.desc())
            .limit(_MOST_STEPS)
            .subquery()
        )
        counted = select(func.sum(newest.c.samples), func.sum(newest.c.input_tokens))
        samples, tokens = session.execute(counted).one()
        if samples:
            return float(tokens / samples)
    return None
