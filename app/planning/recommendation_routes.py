"""Recommendations: what to choose, each with its evidence."""

from typing import Annotated, Literal

from fastapi import Query
from pydantic import StringConstraints

from app.contract.accumulation import MAX_EFFECTIVE_BATCH, ClipMode
from app.contract.architecture import Architecture
from app.contract.arguments import OptimizerChoice
from app.contract.model_reference import StartingModel
from app.devices import gpus, live_workers
from app.devices.gpus import first_devices
from app.errors import Unprocessable
from app.jobs import transitions
from app.models import starting_models
from app.planning.devices import MAX_DEVICE_LENGTH, Device, parse_declared
from app.planning.job_advice import advice_for
from app.planning.recommendation_inputs import Choices, architecture_of_size, situation, submission
from app.planning.recommendations import (
    ModelKind,
    feasibility,
    recommend,
)
from app.planning.schemas import Recommendations
from app.settings import Settings
from app.storage.session import Session
from app.web.dependencies import CurrentDatabase, CurrentSettings, Slowly
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router(tags=["performance"], route_class=SessionRoute)


@router.get("/performance/recommendations", summary="Recommended values, each with its evidence")
async def recommendations(
    slowly: Slowly,
    database: CurrentDatabase,
    settings: CurrentSettings,
    model_size: Annotated[
        str | None, Query(max_length=40, description="small, medium, large, xl, or a parameter count")
    ] = None,
    model_name: Annotated[StartingModel | None, Query()] = None,
    training_id: Annotated[str | None, Query(max_length=100)] = None,
    target_batch_size: Annotated[int | None, Query(ge=1, le=MAX_EFFECTIVE_BATCH)] = None,
    target_effective_batch_size: Annotated[
        int | None, Query(ge=1, le=MAX_EFFECTIVE_BATCH, description="Another name for target_batch_size")
    ] = None,
    optimizer: Annotated[OptimizerChoice | None, Query(description="null: Accrue recommends one")] = None,
    method: Annotated[
        Literal["full", "lora", "qlora"] | None, Query(description="null: the job's, else full")
    ] = None,
    dataset_size: Annotated[
        int | None, Query(ge=1, le=10**12, description="Samples; null: the job's, where one is named")
    ] = None,
    declared: Annotated[
        list[Annotated[str, StringConstraints(max_length=MAX_DEVICE_LENGTH)]] | None,
        Query(alias="gpus", max_length=1024, description="As in 24GB or A100-80GB"),
    ] = None,
    num_gpus: Annotated[
        int | None, Query(ge=1, le=1024, description="GPUs per job; null: 1, or all of `gpus`")
    ] = None,
    clip_mode: Annotated[ClipMode | None, Query(description="null: the job's or after_accumulation")] = None,
    kind: Annotated[
        ModelKind, Query(description="Kind of model: determines the recommended clipping and optimizer")
    ] = "transformer",
) -> Recommendations:
    """Recommends values for a model, for a model size, or for a job from its own measurements."""
    if target_batch_size is not None and target_effective_batch_size is not None:
        raise Unprocessable(
            "target_batch_size and target_effective_batch_size set the same thing: leave one out.",
            field="target_batch_size",
        )
    target = target_effective_batch_size if target_batch_size is None else target_batch_size

    def found() -> Recommendations:
        with database.reading() as session:
            job = transitions.get(session, training_id) if training_id is not None else None
            named = model_name if job is None else job.model_name
            if job is not None:
                architecture = Architecture.model_validate(job.spec["model"]["architecture"])
            elif named is not None:
                architecture = starting_models.find_for_planning(named, database, settings).architecture
            else:
                architecture = architecture_of_size(model_size or "small")
            requested = Choices(target, optimizer, method, dataset_size, clip_mode, kind)
            requested = requested if job is None else requested.completed_from(job)
            devices = _devices(session, settings, declared, num_gpus)
            known = situation(session, architecture, requested, devices, named, job)
            recommended = recommend(known)
            return Recommendations(
                model_name=named,
                model_size=model_size,
                parameters=architecture.parameters,
                **recommended,
                submission=submission(
                    recommended,
                    requested.method or "full",
                    len(devices),
                    known.steps_total,
                    fixes_split=known.clip_mode == "each_micro_batch",
                ),
                advice=feasibility(known) + (advice_for(session, job) if job is not None else []),
            )

    return await slowly(found)  # measurements are read, and all steps of a job


def _devices(
    session: Session, settings: Settings, declared: list[str] | None, num_gpus: int | None
) -> list[Device]:
    if declared is None:
        there = gpus.for_planning(settings.declared_devices, live_workers.gpus(session))
        return first_devices(num_gpus or 1, there)
    try:
        there = parse_declared(declared)
    except ValueError as error:
        raise Unprocessable(f"gpus: {error}.", field="gpus") from None
    return first_devices(num_gpus or len(there), there)
