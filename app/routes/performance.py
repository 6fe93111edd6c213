"""Performance as measured, and what to do about it."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session

from app import base_models, gpus, jobs, measurements, profiles, stats, workers_seen
from app.errors import Unprocessable
from app.models import Job
from app.planning.advice import Figures, advise
from app.planning.architectures import from_config
from app.planning.catalogue import CATALOGUE
from app.planning.devices import GIB, LONGEST_PHRASE, Device, common_name, parse_declared
from app.planning.estimate import MOST_ROWS, largest_micro_batch
from app.planning.plan import precision_for, unsupported
from app.planning.recommendations import (
    SIZES,
    MeasuredNoise,
    MeasuredRate,
    ModelKind,
    Situation,
    recommend,
    recommended_batch,
)
from app.planning.speeds import useful_tokens
from app.routes.dependencies import CurrentSettings, Reading
from app.schemas.accumulation import MAX_EFFECTIVE_BATCH, ClipMode
from app.schemas.architecture import Architecture
from app.schemas.arguments import OptimizerChoice
from app.schemas.calculators import Recommendation
from app.schemas.profile import Recipe
from app.schemas.run import NoiseScale
from app.schemas.spec import OptimizerName, Plan, Spec, TokenBudget
from app.schemas.statistics import PerformanceMetrics, Recommendations
from app.schemas.training import ModelName
from app.settings import Settings
from app.submitting.intake import first_devices
from app.submitting.submission import DEFAULT_EPOCHS, DEFAULT_MAX_LENGTH, memory_limits, method_spec

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
    target_batch_size: Annotated[int | None, Query(ge=1, le=MAX_EFFECTIVE_BATCH)] = None,
    target_effective_batch_size: Annotated[
        int | None, Query(ge=1, le=MAX_EFFECTIVE_BATCH, description="As target_batch_size")
    ] = None,
    optimizer: Annotated[OptimizerChoice | None, Query(description="null: recommended, too")] = None,
    method: Annotated[
        Literal["full", "lora", "qlora"] | None, Query(description="null: the job's, else full")
    ] = None,
    dataset_size: Annotated[
        int | None, Query(ge=1, le=10**12, description="Samples; null: the job's, where one is named")
    ] = None,
    declared: Annotated[
        list[Annotated[str, StringConstraints(max_length=LONGEST_PHRASE)]] | None,
        Query(alias="gpus", max_length=1024, description="As in 24GB or A100-80GB"),
    ] = None,
    num_gpus: Annotated[
        int | None, Query(ge=1, le=1024, description="Of a job; null: 1, or all gpus")
    ] = None,
    clip_mode: Annotated[ClipMode | None, Query(description="null: the job's, else the whole window")] = None,
    kind: Annotated[ModelKind, Query(description="What the rule for clipping is for")] = "transformer",
) -> Recommendations:
    """For a model, for a size of model, or for a job from its own figures."""
    if target_batch_size is not None and target_effective_batch_size is not None:
        raise Unprocessable(
            "target_batch_size and target_effective_batch_size are the same: leave one out.",
            field="target_batch_size",
        )
    target = target_effective_batch_size if target_batch_size is None else target_batch_size
    job = jobs.get(session, training_id) if training_id is not None else None
    if job is not None:
        model_name = job.model_name
        architecture = Architecture.model_validate(job.spec["model"]["architecture"])
    elif model_name is not None:
        architecture = base_models.find_for_planning(model_name, settings).architecture
    else:
        architecture = _of_size(model_size or "small")
    asked = _Asked(target, optimizer, method, dataset_size, clip_mode, kind)
    asked = asked if job is None else asked.with_those_of(job)
    devices = _devices(session, settings, declared, num_gpus)
    recommended = recommend(_situation(session, architecture, asked, devices, model_name, job))
    return Recommendations(
        model_name=model_name,
        model_size=model_size,
        parameters=architecture.parameters,
        **recommended,
        submission=_submission(recommended, asked.method or "full"),
        advice=_advice(session, job) if job is not None else [],
    )


@dataclass(frozen=True)
class _Asked:
    """What recommendations are to hold to; null: recommended, or by default."""

    target: int | None
    optimizer: OptimizerName | None
    method: Literal["full", "lora", "qlora"] | None
    samples: int | None
    clip_mode: ClipMode | None
    kind: ModelKind

    def with_those_of(self, job: Job) -> "_Asked":
        """The job's, where nothing else was asked for; its batch only where it measured no better one."""
        spec = Spec.model_validate(job.spec)
        return replace(
            self,
            target=self.target or (spec.effective_batch_size if _noise_of(job) is None else None),
            optimizer=self.optimizer or spec.optimizer.name,
            method=self.method or spec.method.name,
            samples=self.samples or _samples(spec),
            clip_mode=self.clip_mode or spec.clip_mode,
        )


def _devices(
    session: Session, settings: Settings, declared: list[str] | None, num_gpus: int | None
) -> list[Device]:
    if declared is None:
        there = gpus.for_planning(settings.declared_devices, workers_seen.gpus(session))
        return first_devices(num_gpus or 1, there)
    try:
        there = parse_declared(declared)
    except ValueError as error:
        raise Unprocessable(f"gpus: {error}.", field="gpus") from None
    return first_devices(num_gpus or len(there), there)


def _submission(recommended: dict[str, Recommendation], method: str) -> dict[str, Any]:
    """The recommended values as part of a request for a job."""
    of = {name: own.value for name, own in recommended.items()}
    return {
        "target_effective_batch_size": of["effective_batch_size"],
        "micro_batch_size": of["micro_batch_size"],
        "accumulation_steps": of["accumulation_steps"],
        "gradient_clipping": of["gradient_clipping"],
        "mixed_precision": of["precision"],
        "training_config": {
            name: of[name]
            for name in ("learning_rate", "warmup_steps", "optimizer", "gradient_checkpointing")
        }
        | {"method": method},
    }


def _samples(spec: Spec) -> int | None:
    """Of the training data; null: the tokenizer decides."""
    return spec.data.examples if spec.data.overlength != "split" else None


def _noise_of(job: Job) -> MeasuredNoise | None:
    """What a finished job measured."""
    scale = (job.result or {}).get("noise_scale")
    if scale is None:
        return None
    samples = _samples(Spec.model_validate(job.spec))
    return MeasuredNoise(job.id, NoiseScale.model_validate(scale), samples)


def _rate_of(job: Job) -> MeasuredRate | None:
    """The learning rate of a job that succeeded, and whose loss fell."""
    result = job.result or {}
    first, last = result.get("first_loss"), result.get("final_loss")
    if job.status != "succeeded" or first is None or last is None or not last < first:
        return None
    spec = Spec.model_validate(job.spec)
    return MeasuredRate(
        job.id,
        spec.optimizer.learning_rate,
        spec.effective_batch_size,
        spec.optimizer.name,
        spec.method.lora is not None,
        first,
        last,
    )


def _newest(session: Session, model_name: str) -> list[Job]:
    """The newest finished jobs of a model."""
    finished = select(Job).where(Job.model_name == model_name, Job.status == "succeeded")
    return list(session.scalars(finished.order_by(Job.id.desc()).limit(_NEWEST)))


def _situation(
    session: Session,
    architecture: Architecture,
    asked: _Asked,
    devices: list[Device],
    model_name: str | None,
    job: Job | None,
) -> Situation:
    known = [job] if job is not None else _newest(session, model_name) if model_name is not None else []
    noise = next((noise for each in known if (noise := _noise_of(each)) is not None), None)
    learned = next((rate for each in known if (rate := _rate_of(each)) is not None), None)
    method = method_spec(asked.method or "full")
    recipe = Recipe(
        precision=precision_for("auto", devices[0]),
        optimizer=asked.optimizer or "adamw",
        device=devices[0].kind,
        lora=method.lora,
        quantised=method.name == "qlora",
        expandable_segments=devices[0].expandable_segments,
    )
    for why in unsupported(recipe.device, quantised=recipe.quantised, optimizer=recipe.optimizer):
        raise Unprocessable(f"{why}.", field="method" if recipe.quantised else "optimizer")
    limits = memory_limits(0.9, None, measurements.margin(session, recipe.device))
    budget = limits.budget(min(device.memory_bytes for device in devices))
    usual = min(architecture.positions, DEFAULT_MAX_LENGTH)
    sequence = usual if job is None else int(job.spec["data"]["max_length"])
    measured = profiles.speeds(session, architecture, common_name(devices))(recipe, sequence)
    estimate = profiles.estimates(session, architecture, common_name(devices))(recipe, sequence)
    batch = asked.target or recommended_batch(asked.samples)
    return Situation(
        architecture=architecture,
        target=asked.target,
        micro_batch=largest_micro_batch(estimate, budget),
        devices=len(devices),
        device_kind=devices[0].kind,
        source=estimate.source,
        precision=recipe.precision,
        optimizer=asked.optimizer,
        adapters=method.lora is not None,
        samples=asked.samples,
        clip_mode=asked.clip_mode or "after_accumulation",
        learned=learned,
        noise=noise,
        useful=max(1, useful_tokens(measured, recipe.device, MOST_ROWS * sequence) // sequence),
        swept=measured is not None and measured.saw_the_end,
        kind=asked.kind,
        steps_total=_steps_total(job, asked, batch),
    )


def _steps_total(job: Job | None, asked: _Asked, batch: int) -> int | None:
    """Of the job, or of as many epochs as a job has by default."""
    if job is not None and (total := job.plan["steps_total"] or job.progress.get("steps_total")):
        return int(total)
    return None if asked.samples is None else DEFAULT_EPOCHS * -(-asked.samples // batch)


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
    measured = stats.of_job(session, job).stats
    if not measured.steps:
        return [f"Job {job.id} has not made a step yet: ask again later."]
    spec, plan = Spec.model_validate(job.spec), Plan.model_validate(job.plan)
    share, device = stats.performance(session, job).share, plan.devices[0]
    advice = advise(
        Figures(
            padding_share=measured.padding_share,
            data_share=share.get("data", 0.0),
            optimizer_share=share.get("optimizer", 0.0),
            micro_batches_per_step=measured.micro_steps / measured.steps,
            skipped=measured.skipped,
            size_is_planned=isinstance(plan.cut, TokenBudget) or plan.micro_batches == 1,
            on_gpu=plan.device == "cuda",
            peak_bytes=None if measured.peak_memory_gb is None else measured.peak_memory_gb * GIB,
            limit_bytes=device.memory_limit_bytes,
            micro_batch=device.micro_batch_size,
            gradient_checkpointing=spec.gradient_checkpointing,
            clips_each_micro_batch=spec.clip_mode == "each_micro_batch",
            clipping=spec.gradient_clipping,
            effective_batch=spec.effective_batch_size,
            samples=_samples(spec),
            load=_load(job),
        )
    )
    return advice or ["Nothing stands out in this job's figures."]


def _load(job: Job) -> float | None:
    """How busy the GPU is that a job runs on, where it is this machine's."""
    if job.status != "running":
        return None
    return next((gpu.load for gpu in gpus.seen() if job.device == f"cuda:{gpu.id}"), None)
