"""The calculators: nothing is stored, nothing is queued."""

from math import ceil
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic import StringConstraints, ValidationError

from app.contract.accumulation import MAX_ACCUMULATION_STEPS
from app.contract.spec import OptimizerName
from app.errors import Unprocessable
from app.planning import batch_size, learning_rate
from app.planning.learning_rate import Rule
from app.planning.schemas import (
    AccumulationStepsResponse,
    BatchSizeRequest,
    BatchSizeResponse,
    EffectiveBatchResponse,
    LearningRateResponse,
    ToolConfigRequest,
    ToolConfigResponse,
)
from app.planning.split import split_over
from app.planning.tool_configs import Tool
from app.planning.train_jobs import TrainJob, TrainJobRecommendation
from app.web.dependencies import CurrentDatabase, CurrentSettings, Slowly, in_thread
from app.web.json_bodies import AnyContentTypeRoute
from app.web.routers import native_router

router = native_router(tags=["calculators"], route_class=AnyContentTypeRoute)

Count = Annotated[int, Query(ge=1, le=1_000_000)]
Steps = Annotated[int, Query(ge=1, le=MAX_ACCUMULATION_STEPS)]
Gpus = Annotated[int, Query(ge=1, le=1024)]


@router.post("/calculate-batch-size", summary="The micro-batch that fits, and the accumulation steps")
async def calculate_batch_size(
    request: Request, requested: BatchSizeRequest, settings: CurrentSettings, database: CurrentDatabase
) -> BatchSizeResponse:
    """Calculates for a model by name, or from raw figures in GiB and MiB."""
    return await batch_size.calculate(request, requested, settings, database)


@router.get("/calculate-batch-size", summary="The micro-batch that fits, by query parameters")
async def get_batch_size(
    request: Request,
    settings: CurrentSettings,
    database: CurrentDatabase,
    model_name: str,
    target_batch_size: Annotated[int | None, Query()] = None,
    target_effective_batch_size: Annotated[
        int | None, Query(description="Another name for target_batch_size")
    ] = None,
    micro_batch_size: Annotated[int | None, Query()] = None,
    num_gpus: Annotated[int | None, Query()] = None,
    gpu_ids: Annotated[list[int] | None, Query()] = None,
    declared: Annotated[list[str] | None, Query(alias="gpus")] = None,
    max_length: Annotated[int | None, Query()] = None,
    objective: Annotated[str, Query()] = "sft",
    method: Annotated[str, Query()] = "full",
    optimizer: Annotated[str, Query()] = "adamw",
    mixed_precision: Annotated[str, Query()] = "true",
    gradient_checkpointing: Annotated[bool, Query()] = False,
    max_memory_usage: Annotated[float, Query()] = 0.9,
    memory_safety_margin: Annotated[float | None, Query()] = None,
    wait_seconds: Annotated[float, Query()] = 1.5,
) -> BatchSizeResponse:
    if target_batch_size is not None and target_effective_batch_size is not None:
        raise Unprocessable(
            "target_batch_size and target_effective_batch_size set the same thing: leave one out.",
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
        "objective": objective,
        "method": method,
        "optimizer": optimizer,
        "mixed_precision": {"true": True, "false": False}.get(mixed_precision.lower(), mixed_precision),
        "gradient_checkpointing": gradient_checkpointing,
        "max_memory_usage": max_memory_usage,
        "memory_safety_margin": memory_safety_margin,
        "wait_seconds": wait_seconds,
    }
    try:
        requested = BatchSizeRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "query"
        raise Unprocessable(f"{field}: {first['msg']}.", field=field) from None
    return await batch_size.calculate(request, requested, settings, database)


@router.post("/tool-configs/{tool}", summary="A configuration of another tool with the same effective batch")
async def tool_config(
    request: Request,
    tool: Tool,
    requested: ToolConfigRequest,
    settings: CurrentSettings,
    database: CurrentDatabase,
) -> ToolConfigResponse:
    """Plans as calculate-batch-size does, and writes what trl, axolotl, llamafactory, torchtune, nemo (NeMo
    AutoModel) or kubeflow (a TrainJob that runs TRL) need to train the same effective batch, in the largest
    equal micro-batches of at most the planned size."""
    return await batch_size.configure_tool(request, tool, requested, settings, database)


@router.post("/recommend-train-job", summary="What a TrainJob of Kubeflow Trainer should ask for")
async def recommend_train_job(
    request: Request,
    train_job: TrainJob,
    settings: CurrentSettings,
    database: CurrentDatabase,
    gpu: Annotated[
        list[Annotated[str, StringConstraints(max_length=60)]],
        Query(min_length=1, max_length=20, description='Kinds of GPUs of the cluster: "24GB", "A100-80GB"'),
    ],
) -> TrainJobRecommendation:
    """For a TrainJob that runs TRL: the first kind of GPUs on which it fits, and a JSON merge patch with the
    GPUs that it asks for, and the micro-batch and accumulation steps that train its effective batch on them.
    As in Kubeflow's KEP-3328, a controller in the cluster applies the patch before the job is admitted."""
    return await batch_size.recommend_train_job(request, train_job, gpu, settings, database)


@router.post("/calculate-effective-batch-size", summary="Micro-batch × steps × devices")
def effective_batch_size(
    actual_batch_size: Count, accumulation_steps: Steps, num_gpus: Gpus = 1
) -> EffectiveBatchResponse:
    effective = actual_batch_size * accumulation_steps * num_gpus
    return EffectiveBatchResponse(
        actual_batch_size=actual_batch_size,
        accumulation_steps=accumulation_steps,
        num_gpus=num_gpus,
        effective_batch_size=effective,
        explanation=f"{actual_batch_size} samples × {accumulation_steps} accumulation steps × {num_gpus} "
        f"device{'s' * (num_gpus > 1)} = {effective} samples per optimizer step.",
    )


@router.post(
    "/calculate-accumulation-steps",
    summary="The accumulation steps for a target batch",
    response_model=AccumulationStepsResponse,
)
async def accumulation_steps(
    slowly: Slowly, target_batch_size: Count, actual_batch_size: Count, num_gpus: Gpus = 1
) -> Response:
    def calculated() -> Response:
        found = _accumulation_steps(target_batch_size, actual_batch_size, num_gpus)
        return Response(found.model_dump_json(), media_type="application/json")

    is_long = target_batch_size > _MANY_SIZES * actual_batch_size
    return await (slowly(calculated) if is_long else in_thread(calculated))


_MANY_SIZES = 10_000
"""An answer that lists more micro-batches than this takes up to half a second."""


def _accumulation_steps(
    target_batch_size: int, actual_batch_size: int, num_gpus: int
) -> AccumulationStepsResponse:
    steps = ceil(target_batch_size / (actual_batch_size * num_gpus))
    if steps > MAX_ACCUMULATION_STEPS:
        raise Unprocessable(
            f"This takes {steps} accumulation steps, more than {MAX_ACCUMULATION_STEPS}: raise "
            "actual_batch_size, or lower the target.",
            field="actual_batch_size",
        )
    devices = split_over(target_batch_size, [actual_batch_size] * num_gpus)
    even = len({size for own in devices if own for size in (own.largest, own.smallest)}) == 1
    return AccumulationStepsResponse(
        target_batch_size=target_batch_size,
        actual_batch_size=actual_batch_size,
        num_gpus=num_gpus,
        accumulation_steps=steps,
        effective_batch_size=sum(own.samples for own in devices),
        exact=True,
        micro_batch_sizes=devices[0].sizes(),
        devices=[own.sizes() for own in devices],
        explanation=f"{target_batch_size} samples in {steps} accumulation step{'s' * (steps > 1)} of at most "
        f"{actual_batch_size} on {num_gpus} device{'s' * (num_gpus > 1)}"
        + (
            "."
            if even
            else ". The micro-batches differ in size; the target and the gradient are still exact."
        ),
    )


@router.post("/adjust-learning-rate", summary="A learning rate for the larger batch")
def adjust_learning_rate(
    base_lr: Annotated[float, Query(gt=0, le=100, allow_inf_nan=False)],
    accumulation_steps: Steps,
    num_gpus: Gpus = 1,
    rule: Annotated[Rule | None, Query()] = None,
    optimizer: Annotated[OptimizerName, Query()] = "adamw",
    actual_batch_size: Count = 8,
) -> LearningRateResponse:
    """`rule` defaults to linear for sgd and lars, and to sqrt for other optimizers."""
    growth = accumulation_steps * num_gpus
    chosen = rule or learning_rate.default_rule(optimizer)
    scale = learning_rate.scale(chosen, growth)
    warmup = learning_rate.warmup_steps(growth * actual_batch_size)
    return LearningRateResponse(
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
