"""The batch-size calculator: looks up what a request names, then runs the planner."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fastapi import Request

from app.contract.accumulation import Precision
from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.objective import FORMATS, SEQUENCES_PER_SAMPLE, ObjectiveName
from app.contract.spec import MemoryLimits, RequestedSplit
from app.devices import gpus, live_workers
from app.devices.gpus import first_devices, select_devices
from app.errors import Unprocessable
from app.memory_profiles import measurements, profiles
from app.memory_profiles.profiles import ProfileKey
from app.models import base_models, starting_models
from app.planning.defaults import DEFAULT_MAX_LENGTH, memory_limits, method_spec
from app.planning.devices import GIB, MIB, Device, common_name, parse_declared
from app.planning.learning_rate import default_rate
from app.planning.memory import OPTIMIZER_STATES
from app.planning.planner import Question, recipe_of_rank
from app.planning.recipes import least_capable, make_recipe, unsupported
from app.planning.responses import RawQuestion, answer, answer_raw, step_to_simulate
from app.planning.schemas import (
    BatchSizeRequest,
    BatchSizeResponse,
    ToolConfigRequest,
    ToolConfigResponse,
)
from app.planning.split import ConflictingBatch, check_steps
from app.planning.tool_configs import Tool, config_for
from app.planning.tool_configs.job import NotExpressible, ToolJob, split_evenly
from app.planning.train_jobs import TrainJob, TrainJobRecommendation, TrlJob
from app.settings import Settings
from app.storage.database import Database
from app.storage.waits import WaitLimiter

_MAX_SIMULATED_CHANGES = 4
"""If a step does not fit, at most this many changes that might make it fit are simulated one after another,
within `wait_seconds`."""


_MANY_DEVICES = 16
"""Calculations for more devices count as slow requests: they take up to a second."""


def _count_devices(requested: BatchSizeRequest) -> int:
    return max(requested.num_gpus or 1, len(requested.gpus or ()), len(requested.gpu_ids or ()))


async def calculate(
    request: Request,
    requested: BatchSizeRequest,
    settings: Settings,
    database: Database,
    *,
    may_shard: bool = True,
) -> BatchSizeResponse:
    """Calculates in worker threads, and occupies none while it waits for a simulation.

    Args:
        may_shard: whether the devices may divide a model of which full copies do not fit.
    """
    key_id, turns = request.state.caller.key_id, request.app.state.thread_turns

    async def in_thread(work: Callable[[], BatchSizeResponse], *, is_slow: bool) -> BatchSizeResponse:
        slow_work = request.app.state.slow_work
        found: BatchSizeResponse = await (
            slow_work.run(key_id, work) if is_slow else turns.read(key_id, work)
        )
        return found

    if requested.model_name is None:
        limits = memory_limits(requested.max_memory_usage, requested.memory_safety_margin)
        calculated = partial(_from_figures, requested, limits)
        return await in_thread(calculated, is_slow=_count_devices(requested) > _MANY_DEVICES)
    waits: WaitLimiter = request.app.state.waits
    seconds = requested.wait_seconds if waits.has_place(key_id) else 0.0
    until = time.monotonic() + seconds
    looked_up = await turns.read(key_id, partial(_look_up, requested, settings, database, may_shard))

    is_slow = len(looked_up.question.devices) > _MANY_DEVICES

    async def answered() -> BatchSizeResponse:
        work = partial(_answered, looked_up, profile_warnings, database)
        return await in_thread(work, is_slow=is_slow)

    async def wait_for_profile(recipe: Recipe, sequence: int) -> list[str]:
        base = looked_up.base
        wanted = ProfileKey(looked_up.model_name, base.architecture, base.config, recipe, sequence)
        left = max(0.0, until - time.monotonic())
        return await profiles.wait_for(database, wanted, left, request.is_disconnected)

    with waits.place(key_id) if seconds else nullcontext():
        profile_warnings = await wait_for_profile(looked_up.question.recipe, looked_up.question.sequence)
        found = await answered()
        if found.zero_stage is not None and found.source == "formula" and not profile_warnings:
            question, devices = looked_up.question, len(found.devices)
            own = recipe_of_rank(question.recipe, devices, found.strategy, found.zero_stage)
            profile_warnings = await wait_for_profile(own, question.sequence)
            found = await answered()
        for _ in range(
            0 if profile_warnings else _MAX_SIMULATED_CHANGES
        ):  # a warning means that no simulation was finished in time
            step = step_to_simulate(found, looked_up.question)
            if step is None or await wait_for_profile(*step):
                break
            found = await answered()
    return found


@dataclass(frozen=True)
class _ResolvedRequest:
    """A request, with the model and the devices that it names."""

    model_name: str
    base: base_models.PlannableModel
    question: Question
    warnings: list[str]


def _look_up(
    requested: BatchSizeRequest, settings: Settings, database: Database, may_shard: bool
) -> _ResolvedRequest:
    assert requested.model_name is not None
    base = starting_models.find_for_planning(requested.model_name, database, settings)
    devices, warnings = devices_of(requested, settings, database)
    recipe, sequence = _recipe(requested, least_capable(devices)), _sequence(requested, base.architecture)
    warnings += unsupported(recipe.device, quantised=recipe.quantised, optimizer=requested.optimizer).values()
    with database.reading() as session:
        margin = measurements.margin(session, recipe.device)
    question = Question(
        recipe=recipe,
        sequence=sequence,
        devices=devices,
        limits=memory_limits(requested.max_memory_usage, requested.memory_safety_margin, margin),
        effective_batch=requested.target_effective_batch_size,
        split=RequestedSplit(
            accumulation_steps=None, micro_batch_size=requested.micro_batch_size, devices=len(devices)
        ),
        sequences_per_sample=SEQUENCES_PER_SAMPLE.get(FORMATS[requested.objective][0], 1),
        may_shard=may_shard,
    )
    return _ResolvedRequest(requested.model_name, base, question, warnings)


def _answered(
    looked_up: _ResolvedRequest, profile_warnings: list[str], database: Database
) -> BatchSizeResponse:
    question, base = looked_up.question, looked_up.base
    with database.reading() as session:
        known = profiles.known(session, base.architecture, common_name(question.devices))
        warnings = [*looked_up.warnings, *profile_warnings]
        found = answer(question, known, looked_up.model_name, warnings)
    if question.split.micro_batch_size is not None:  # as for a job
        try:
            check_steps(found.accumulation_steps, question.split.micro_batch_size)
        except ConflictingBatch as error:
            raise Unprocessable(f"{error}.", field=error.field) from None
    return found


async def configure_tool(
    request: Request, tool: Tool, requested: ToolConfigRequest, settings: Settings, database: Database
) -> ToolConfigResponse:
    """Another tool's configuration for what the calculator plans.

    Raises:
        Unprocessable: not even one sample fits, the batch cannot be split evenly, the model was trained here,
            or the tool cannot train this.
    """
    assert requested.target_effective_batch_size is not None
    if starting_models.is_trained(requested.model_name or ""):
        raise Unprocessable(
            "Other tools do not know the names of models that were trained here: export the model, "
            "and put the folder's path into the configuration of its base model.",
            field="model_name",
        )
    # These configurations give each device a full copy of the model.
    answered = await calculate(request, requested, settings, database, may_shard=False)
    if not answered.fits:
        raise Unprocessable(f"No configuration is written. {answered.explanation}", field="model_name")
    look_up = partial(_look_up, requested, settings, database, False)
    looked_up = await request.app.state.thread_turns.read(request.state.caller.key_id, look_up)
    question = looked_up.question
    method = method_spec(requested.method)
    rate = requested.learning_rate or default_rate(requested.objective, adapters=method.lora is not None)
    # These tools give every device the same micro-batch: that of the smallest device.
    largest = [device.max_micro_batch_size for device in answered.devices]
    try:
        split = split_evenly(
            requested.target_effective_batch_size,
            len(question.devices),
            max(1, min([answered.actual_batch_size_per_gpu, *largest])),
        )
        found = config_for(
            tool,
            ToolJob(
                model=base_models.full_name(requested.model_name or "", settings),
                objective=requested.objective,
                method=method,
                split=split,
                precision=question.recipe.precision,
                optimizer=requested.optimizer,
                gradient_checkpointing=requested.gradient_checkpointing,
                max_length=question.sequence,
                learning_rate=rate,
                epochs=requested.epochs,
                data=requested.data,
            ),
        )
    except NotExpressible as error:
        raise Unprocessable(f"{error}.", field="tool") from None
    return ToolConfigResponse(
        tool=tool,
        content=found.content,
        file_name=found.file_name,
        command=found.command,
        effective_batch_size=split.effective_batch,
        micro_batch_size=split.micro_batch,
        accumulation_steps=split.steps,
        devices=split.devices,
        warnings=answered.warnings,
    )


async def recommend_train_job(
    request: Request, train_job: TrainJob, gpus: list[str], settings: Settings, database: Database
) -> TrainJobRecommendation:
    """What a TrainJob should ask for, on the first kind of GPUs on which it fits.

    Args:
        gpus: kinds of GPUs that the cluster has, such as "24GB" or "A100-80GB", the preferred ones first.

    Raises:
        Unprocessable: it does not run TRL, fits on no kind, or its GPUs cannot share its batch.
    """
    job = TrlJob(train_job)
    for gpu in gpus:
        requested = job.request(gpu)
        answered = await calculate(request, requested, settings, database, may_shard=False)
        if answered.fits:
            break
    else:
        raise Unprocessable(f"No resources are recommended. {answered.explanation}", field="gpu")
    split = job.split(max(1, answered.actual_batch_size_per_gpu))
    look_up = partial(_look_up, requested, settings, database, False)
    looked_up = await request.app.state.thread_turns.read(request.state.caller.key_id, look_up)
    return TrainJobRecommendation(
        patch=job.patch(split),
        gpu=gpu,
        gpus_per_node=job.gpus_per_node,
        nodes=job.nodes,
        effective_batch_size=split.effective_batch,
        micro_batch_size=split.micro_batch,
        accumulation_steps=split.steps,
        explanation=answered.explanation,
        warnings=[*answered.warnings, _memory_of_logits(looked_up, split.micro_batch)],
    )


def _memory_of_logits(looked_up: _ResolvedRequest, micro_batch: int) -> str:
    """What TRL needs beyond what Accrue's trainer does, as a warning."""
    question = looked_up.question
    tokens = micro_batch * question.sequences_per_sample * question.sequence
    size = 4 * tokens * looked_up.base.architecture.vocabulary / GIB
    return (
        "memory is predicted for Accrue's trainer, which never holds the logits of all tokens at once; if "
        f"TRL does, it needs up to {size:.1f} GiB more for them, and as much for their gradient"
    )


def _recipe(requested: BatchSizeRequest, device: Device) -> Recipe:
    precision: Literal["auto"] | Precision
    if isinstance(requested.mixed_precision, bool):
        precision = "auto" if requested.mixed_precision else "no"
    else:
        precision = requested.mixed_precision
    return make_recipe(
        device,
        precision,
        requested.optimizer,
        method_spec(requested.method),
        gradient_checkpointing=requested.gradient_checkpointing,
        scores=_ASSUMED_SCORES.get(requested.objective, 0),
    )


_ASSUMED_SCORES: dict[ObjectiveName, int] = {"classification": 2, "reward": 1}
"""The scores that a model gives to a sequence; more classes need hardly more memory."""


def _sequence(requested: BatchSizeRequest, architecture: Architecture) -> int:
    sequence = requested.max_length or min(architecture.positions, DEFAULT_MAX_LENGTH)
    if sequence > architecture.positions:
        raise Unprocessable(
            f"max_length {sequence} is longer than {requested.model_name}'s context of "
            f"{architecture.positions} tokens: lower it, or choose a model with a longer context.",
            field="max_length",
        )
    return sequence


def _from_figures(requested: BatchSizeRequest, limits: MemoryLimits) -> BatchSizeResponse:
    weights_gb, sample_mb, available_gb = requested.raw_figures
    return answer_raw(
        RawQuestion(
            weights_bytes=int(weights_gb * GIB),
            sample_bytes=max(1, int(sample_mb * MIB)),
            available_bytes=int(available_gb * GIB),
            limits=limits,
            optimizer_states=OPTIMIZER_STATES[requested.optimizer],
            devices=requested.num_gpus or len(requested.gpu_ids or requested.gpus or [0]),
            target=requested.target_effective_batch_size,
        )
    )


def devices_of(
    requested: BatchSizeRequest, settings: Settings, database: Database
) -> tuple[list[Device], list[str]]:
    """The devices to plan for: those that the request names, or else the requested number of available
    ones, or else all available ones. Also returns warnings."""
    if requested.gpus is not None:
        try:
            return parse_declared(requested.gpus), []
        except ValueError as error:
            raise Unprocessable(f"gpus: {error}.", field="gpus") from None
    with database.reading() as session:
        there = gpus.for_planning(settings.declared_devices, live_workers.gpus(session))
    if requested.gpu_ids is not None:
        return select_devices(requested.gpu_ids, there), []
    wanted = first_devices(requested.num_gpus, there) if requested.num_gpus else there
    warnings = []
    if there[0].kind == "cpu":
        warnings.append(
            "no GPU was found or declared, so this plan is for the CPU and this machine's memory: set "
            'gpus: ["24GB"] (accrue plan: --gpu 24GB), or set ACCRUE_GPUS=24GB'
        )
    if len(wanted) > len(there):
        warnings.append(
            f"{len(wanted)} devices were requested, but only {len(there)} found: the others are assumed to "
            "be like the last one, each with memory of its own"
        )
    return wanted, warnings
