"""Performance as measured, and what to do about it."""

from dataclasses import asdict, replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from app import base_models, gpus, jobs, measurements, profiles, stats, workers_seen
from app.errors import Unprocessable
from app.models import Job
from app.planning.architectures import from_config
from app.planning.catalogue import CATALOGUE
from app.planning.devices import Device, common_name
from app.planning.estimate import MOST_ROWS, largest_micro_batch
from app.planning.plan import precision_for
from app.planning.recommendations import SIZES, MeasuredNoise, ModelKind, Situation, recommend
from app.planning.speeds import useful_tokens
from app.routes.dependencies import CurrentSettings, Reading
from app.schemas.architecture import Architecture
from app.schemas.profile import Recipe
from app.schemas.run import NoiseScale
from app.schemas.spec import OptimizerName
from app.schemas.statistics import PerformanceMetrics, Recommendations, Statistics
from app.schemas.training import ModelName
from app.submitting.intake import first_devices
from app.submitting.submission import DEFAULT_MAX_LENGTH, memory_limits

router = APIRouter(prefix="/performance", tags=["performance"])

_NEWEST = 20
_UNITS = {"m": 10**6, "b": 10**9}
"""As in 350m and 2b."""


@router.get("/metrics", summary="GPUs, jobs and answers, as measured")
def metrics(request: Request, session: Reading) -> PerformanceMetrics:
    newest = session.scalars(select(Job).where(Job.attempt > 0).order_by(Job.id.desc()).limit(_NEWEST)).all()
    return PerformanceMetrics(
        gpus=[asdict(gpu) for gpu in gpus.seen()],
        jobs=stats.performances(session, newest),
        api_latency=request.app.state.latency.read(),
    )


@router.get("/recommendations", summary="What to choose, each with its evidence")
def recommendations(
    session: Reading,
    settings: CurrentSettings,
    model_size: Annotated[
        str | None, Query(max_length=40, description="small, medium, large, xl, or a parameter count")
    ] = None,
    model_name: Annotated[ModelName | None, Query()] = None,
    training_id: Annotated[str | None, Query(max_length=100)] = None,
    target_batch_size: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    optimizer: Annotated[OptimizerName, Query()] = "adamw",
    num_gpus: Annotated[int, Query(ge=1, le=1024, description="Of a job")] = 1,
    kind: Annotated[ModelKind, Query(description="What the rule for clipping is for")] = "transformer",
) -> Recommendations:
    """For a model, for a size of model, or for a job from its own figures."""
    advice: list[str] = []
    noise = steps_total = None
    if training_id is not None:
        job = jobs.get(session, training_id)
        model_name = job.model_name
        architecture = Architecture.model_validate(job.spec["model"]["architecture"])
        advice, noise = _advice(session, job), _noise_of(job)
        steps_total = job.plan["steps_total"] or job.progress.get("steps_total")
        if noise is None:
            target_batch_size = target_batch_size or int(job.spec["effective_batch_size"])
    elif model_name is not None:
        architecture = base_models.find_for_planning(model_name, settings).architecture
        noise = _newest_noise(session, model_name)
    else:
        architecture = _of_size(model_size or "small")
    there = gpus.for_planning(settings.declared_devices, workers_seen.gpus(session))
    devices = first_devices(num_gpus, there)
    situation = _situation(session, architecture, target_batch_size, optimizer, devices)
    return Recommendations(
        model_name=model_name,
        model_size=model_size,
        parameters=architecture.parameters,
        **recommend(replace(situation, noise=noise, kind=kind, steps_total=steps_total)),
        advice=advice,
    )


def _noise_of(job: Job) -> MeasuredNoise | None:
    """What a finished job measured."""
    scale = (job.result or {}).get("noise_scale")
    if scale is None:
        return None
    samples = job.spec["data"]["examples"] if job.spec["data"]["overlength"] != "split" else None
    return MeasuredNoise(job.id, NoiseScale.model_validate(scale), samples)


def _newest_noise(session: Session, model_name: str) -> MeasuredNoise | None:
    """What the newest finished job of a model measured."""
    finished = select(Job).where(Job.model_name == model_name, Job.status == "succeeded")
    newest = session.scalars(finished.order_by(Job.id.desc()).limit(_NEWEST))
    return next((noise for job in newest if (noise := _noise_of(job)) is not None), None)


def _situation(
    session: Session,
    architecture: Architecture,
    target: int | None,
    optimizer: OptimizerName,
    devices: list[Device],
) -> Situation:
    recipe = Recipe(precision=precision_for("auto", devices[0]), optimizer=optimizer, device=devices[0].kind)
    limits = memory_limits(0.9, None, measurements.margin(session, recipe.device))
    budget = limits.budget(min(device.memory_bytes for device in devices))
    sequence = min(architecture.positions, DEFAULT_MAX_LENGTH)
    measured = profiles.speeds(session, architecture, common_name(devices))(recipe, sequence)
    estimate = profiles.estimates(session, architecture, common_name(devices))(recipe, sequence)
    return Situation(
        architecture=architecture,
        target=target,
        micro_batch=largest_micro_batch(estimate, budget),
        devices=len(devices),
        device_kind=devices[0].kind,
        source=estimate.source,
        optimizer=optimizer,
        useful=max(1, useful_tokens(measured, recipe.device, MOST_ROWS * sequence) // sequence),
        swept=measured is not None and measured.saw_the_end,
    )


def _of_size(size: str) -> Architecture:
    """The GPT-2 of the catalogue nearest to a size, with that many parameters."""
    try:
        number, unit = (size[:-1], size[-1].lower()) if size[-1:].lower() in _UNITS else (size, "")
        parameters = SIZES.get(size.lower()) or int(float(number) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        parameters = 0
    if not 0 < parameters <= 10**13:
        raise Unprocessable(
            f"model_size {size} is none of {', '.join(SIZES)}, nor a parameter count.", field="model_size"
        )
    nearest = min(
        (from_config(config) for config in CATALOGUE.values()), key=lambda a: abs(a.parameters - parameters)
    )
    return nearest.model_copy(update={"parameters": parameters})


def _advice(session: Session, job: Job) -> list[str]:
    """Sentences from a job's own figures."""
    measured: Statistics = stats.of_job(session, job).stats
    if not measured.steps:
        return [f"Job {job.id} has not made a step yet: ask again later."]
    advice = []
    if measured.padding_share is not None and measured.padding_share > 0.1:
        advice.append(
            f"{measured.padding_share:.0%} of the work went into padding: let the micro-batches be planned "
            "(a token budget) instead of fixing their size."
        )
    per_step = measured.micro_steps / measured.steps
    if per_step > 8:
        advice.append(
            f"{per_step:.0f} micro-batches a step: if memory allows, larger ones keep the device busier."
        )
    if measured.skipped:
        advice.append(
            f"{measured.skipped} windows were not applied: see the job's events for the samples at fault."
        )
    return advice or ["Nothing stands out in this job's figures."]
