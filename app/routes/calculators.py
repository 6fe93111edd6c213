"""The calculators: nothing is stored, nothing is queued."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError

from app import base_models, gpus, measurements, profiles, workers_seen
from app.database import Database
from app.errors import Unprocessable
from app.planning import learning_rate
from app.planning.batch_size import Question, RawQuestion, advised, answer, answer_raw
from app.planning.devices import GIB, MIB, Device, common_name, parse_declared
from app.planning.learning_rate import Rule
from app.planning.memory import OPTIMIZER_STATES
from app.planning.plan import precision_for, unsupported
from app.planning.split import split_over
from app.profiles import Wanted
from app.routes.dependencies import CurrentDatabase, CurrentSettings
from app.routes.json_bodies import JsonWhateverTheHeader
from app.schemas.accumulation import MAX_ACCUMULATION_STEPS, Precision
from app.schemas.architecture import Architecture
from app.schemas.calculators import (
    AccumulationStepsAnswer,
    BatchSizeAnswer,
    BatchSizeRequest,
    EffectiveBatchAnswer,
    LearningRateAnswer,
)
from app.schemas.profile import Recipe
from app.schemas.spec import MemoryLimits, OptimizerName
from app.settings import Settings
from app.submitting.intake import first_devices, select_devices
from app.submitting.submission import DEFAULT_MAX_LENGTH, memory_limits, method_spec
from app.waits import Waits

_ADVICE_CHECKED = 4
"""Changes that would make a step fit, simulated one after the other while there is time."""

router = APIRouter(tags=["calculators"], route_class=JsonWhateverTheHeader)

Count = Annotated[int, Query(ge=1, le=1_000_000)]
Steps = Annotated[int, Query(ge=1, le=MAX_ACCUMULATION_STEPS)]
Gpus = Annotated[int, Query(ge=1, le=1024)]


@router.post("/calculate-batch-size", summary="The micro-batch that fits, and the steps to a target")
async def calculate_batch_size(
    request: Request, asked: BatchSizeRequest, settings: CurrentSettings, database: CurrentDatabase
) -> BatchSizeAnswer:
    """From a model by name, or from raw figures in GiB and MiB."""
    return await _batch_size(request, asked, settings, database)


@router.get("/calculate-batch-size", summary="The same, asked by query")
async def get_batch_size(
    request: Request,
    settings: CurrentSettings,
    database: CurrentDatabase,
    model_name: str,
    target_batch_size: Annotated[int | None, Query()] = None,
    target_effective_batch_size: Annotated[int | None, Query(description="As target_batch_size")] = None,
    micro_batch_size: Annotated[int | None, Query()] = None,
    num_gpus: Annotated[int | None, Query()] = None,
    gpu_ids: Annotated[list[int] | None, Query()] = None,
    declared: Annotated[list[str] | None, Query(alias="gpus")] = None,
    max_length: Annotated[int | None, Query()] = None,
    method: Annotated[str, Query()] = "full",
    optimizer: Annotated[str, Query()] = "adamw",
    mixed_precision: Annotated[str, Query()] = "true",
    gradient_checkpointing: Annotated[bool, Query()] = False,
    max_memory_usage: Annotated[float, Query()] = 0.9,
    memory_safety_margin: Annotated[float | None, Query()] = None,
    wait_seconds: Annotated[float, Query()] = 1.5,
) -> BatchSizeAnswer:
    if target_batch_size is not None and target_effective_batch_size is not None:
        raise Unprocessable(
            "target_batch_size and target_effective_batch_size are the same: leave one out.",
            field="target_batch_size",
        )
    given = {
        "model_name": model_name,
        "target_batch_size": target_effective_batch_size if target_batch_size is None else target_batch_size,
        "micro_batch_size": micro_batch_size,
        "num_gpus": num_gpus,
        "gpu_ids": gpu_ids,
        "gpus": declared,
        "max_length": max_length,
        "method": method,
        "optimizer": optimizer,
        "mixed_precision": {"true": True, "false": False}.get(mixed_precision.lower(), mixed_precision),
        "gradient_checkpointing": gradient_checkpointing,
        "max_memory_usage": max_memory_usage,
        "memory_safety_margin": memory_safety_margin,
        "wait_seconds": wait_seconds,
    }
    try:
        asked = BatchSizeRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "query"
        raise Unprocessable(f"{field}: {first['msg']}.", field=field) from None
    return await _batch_size(request, asked, settings, database)


@router.post("/calculate-effective-batch-size", summary="Micro-batch × steps × devices")
def effective_batch_size(
    actual_batch_size: Count, accumulation_steps: Steps, num_gpus: Gpus = 1
) -> EffectiveBatchAnswer:
    effective = actual_batch_size * accumulation_steps * num_gpus
    return EffectiveBatchAnswer(
        actual_batch_size=actual_batch_size,
        accumulation_steps=accumulation_steps,
        num_gpus=num_gpus,
        effective_batch_size=effective,
        explanation=f"{actual_batch_size} samples × {accumulation_steps} accumulation steps × {num_gpus} "
        f"device{'s' * (num_gpus > 1)} = {effective} samples per optimizer step.",
    )


@router.post("/calculate-accumulation-steps", summary="The steps to a target, met exactly")
def accumulation_steps(
    target_batch_size: Count, actual_batch_size: Count, num_gpus: Gpus = 1
) -> AccumulationStepsAnswer:
    steps = ceil(target_batch_size / (actual_batch_size * num_gpus))
    if steps > MAX_ACCUMULATION_STEPS:
        raise Unprocessable(
            f"This takes {steps} accumulation steps, more than {MAX_ACCUMULATION_STEPS}: raise "
            "actual_batch_size, or lower the target.",
            field="actual_batch_size",
        )
    devices = split_over(target_batch_size, [actual_batch_size] * num_gpus)
    even = len({size for own in devices for size in own}) == 1
    return AccumulationStepsAnswer(
        target_batch_size=target_batch_size,
        actual_batch_size=actual_batch_size,
        num_gpus=num_gpus,
        accumulation_steps=steps,
        effective_batch_size=sum(map(sum, devices)),
        exact=True,
        micro_batch_sizes=devices[0],
        devices=devices,
        explanation=f"{target_batch_size} samples in {steps} step{'s' * (steps > 1)} of at most "
        f"{actual_batch_size} on {num_gpus} device{'s' * (num_gpus > 1)}"
        + ("." if even else ", unevenly: the target is met exactly, and so is the gradient."),
    )


@router.post("/adjust-learning-rate", summary="A learning rate for the larger batch")
def adjust_learning_rate(
    base_lr: Annotated[float, Query(gt=0, le=100, allow_inf_nan=False)],
    accumulation_steps: Steps,
    num_gpus: Gpus = 1,
    rule: Annotated[Rule | None, Query()] = None,
    optimizer: Annotated[OptimizerName, Query()] = "adamw",
    actual_batch_size: Count = 8,
) -> LearningRateAnswer:
    """`rule` defaults to sqrt, and to linear where the optimizer is sgd."""
    growth = accumulation_steps * num_gpus
    chosen = rule or learning_rate.default_rule(optimizer)
    scale = learning_rate.scale(chosen, growth)
    warmup = learning_rate.warmup_steps(growth * actual_batch_size)
    return LearningRateAnswer(
        base_lr=base_lr,
        accumulation_steps=accumulation_steps,
        num_gpus=num_gpus,
        adjusted_lr=base_lr * scale,
        scale=scale,
        rule=chosen,
        all={name: base_lr * learning_rate.scale(name, growth) for name in learning_rate.WHY},
        warmup_steps=warmup,
        explanation=f"The batch grows {growth}-fold, so the rate is multiplied by {scale:g}: "
        f"{learning_rate.WHY[chosen]}. Warm up over at most {warmup} steps, and at most a tenth of the run.",
    )


async def _batch_size(
    request: Request, asked: BatchSizeRequest, settings: Settings, database: Database
) -> BatchSizeAnswer:
    """In threads, but for the waits in between."""
    if asked.model_name is None:
        return _from_figures(asked, memory_limits(asked.max_memory_usage, asked.memory_safety_margin))
    waits: Waits = request.app.state.waits
    key_id = request.state.caller.key_id
    seconds = asked.wait_seconds if waits.has_place(key_id) else 0.0
    until = time.monotonic() + seconds
    known = await to_thread.run_sync(_known, asked, settings, database)

    async def profiled(recipe: Recipe, sequence: int) -> list[str]:
        wanted = Wanted(asked.model_name or "", known.base.architecture, known.base.config, recipe, sequence)
        left = max(0.0, until - time.monotonic())
        return await profiles.wait_for(database, wanted, left, request.is_disconnected)

    with waits.place(key_id) if seconds else nullcontext():
        told = await profiled(known.question.recipe, known.question.sequence)
        found = await to_thread.run_sync(_answered, known, told, database)
        for _ in range(0 if told else _ADVICE_CHECKED):  # told: nobody simulates, or not in time
            change = advised(found, known.question)
            if change is None or await profiled(change.recipe, change.sequence):
                break
            found = await to_thread.run_sync(_answered, known, told, database)
    return found


@dataclass(frozen=True)
class _Known:
    """A request with what it names looked up."""

    base: base_models.BaseModel
    question: Question
    warnings: list[str]


def _known(asked: BatchSizeRequest, settings: Settings, database: Database) -> _Known:
    assert asked.model_name is not None
    base = base_models.find_for_planning(asked.model_name, settings)
    devices, warnings = _devices(asked, settings, database)
    recipe, sequence = _recipe(asked, devices[0]), _sequence(asked, base.architecture)
    warnings += unsupported(recipe.device, quantised=recipe.quantised, optimizer=asked.optimizer)
    with database.reading() as session:
        margin = measurements.margin(session, recipe.device)
    question = Question(
        asked.model_name, base.architecture, recipe, sequence,
        memory_limits(asked.max_memory_usage, asked.memory_safety_margin, margin), devices,
        asked.target_effective_batch_size, asked.micro_batch_size,
    )  # fmt: skip
    return _Known(base, question, warnings)


def _answered(known: _Known, told: list[str], database: Database) -> BatchSizeAnswer:
    question = known.question
    with database.reading() as session:
        on = (session, question.architecture, common_name(question.devices))
        return answer(question, profiles.estimates(*on), [*known.warnings, *told], profiles.speeds(*on))


def _recipe(asked: BatchSizeRequest, device: Device) -> Recipe:
    method, precision = method_spec(asked.method), asked.mixed_precision
    auto: Literal["auto"] | Precision = (
        ("auto" if precision else "no") if isinstance(precision, bool) else precision
    )
    return Recipe(
        device=device.kind,
        precision=precision_for(auto, device),
        optimizer=asked.optimizer,
        lora=method.lora,
        quantised=method.name == "qlora",
        gradient_checkpointing=asked.gradient_checkpointing,
        expandable_segments=device.expandable_segments,
    )


def _sequence(asked: BatchSizeRequest, architecture: Architecture) -> int:
    sequence = asked.max_length or min(architecture.positions, DEFAULT_MAX_LENGTH)
    if sequence > architecture.positions:
        raise Unprocessable(
            f"max_length {sequence} is longer than {asked.model_name}'s {architecture.positions} positions: "
            "lower it, or choose a model with a longer context.",
            field="max_length",
        )
    return sequence


def _from_figures(asked: BatchSizeRequest, limits: MemoryLimits) -> BatchSizeAnswer:
    weights_gb, sample_mb, available_gb = asked.raw_figures
    return answer_raw(
        RawQuestion(
            weights_bytes=int(weights_gb * GIB),
            activation_bytes_per_sample=max(1, int(sample_mb * MIB)),
            available_bytes=int(available_gb * GIB),
            limits=limits,
            optimizer_states=OPTIMIZER_STATES[asked.optimizer],
            devices=asked.num_gpus or len(asked.gpu_ids or asked.gpus or [0]),
            target=asked.target_effective_batch_size,
        )
    )


def _devices(
    asked: BatchSizeRequest, settings: Settings, database: Database
) -> tuple[list[Device], list[str]]:
    """The devices that were named, or as many as were asked for of those there are, or all of them; with the
    warning that this deserves."""
    if asked.gpus is not None:
        try:
            return parse_declared(asked.gpus), []
        except ValueError as error:
            raise Unprocessable(f"gpus: {error}.", field="gpus") from None
    with database.reading() as session:
        there = gpus.for_planning(settings.declared_devices, workers_seen.gpus(session))
    if asked.gpu_ids is not None:
        return select_devices(asked.gpu_ids, there), []
    wanted = first_devices(asked.num_gpus, there) if asked.num_gpus else there
    warnings = []
    if there[0].kind == "cpu":
        warnings.append(
            "no GPU is here and none is declared, so this is for the CPU and this machine's memory: say "
            'gpus: ["24GB"], or set ACCRUE_GPUS=24GB'
        )
    elif len(wanted) > len(there):
        warnings.append(
            f"there are {len(there)} devices, not {len(wanted)}: the others are taken to be like the last"
        )
    return wanted, warnings
