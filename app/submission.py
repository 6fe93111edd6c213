"""From what was asked to what is frozen: every default filled in, everything checkable checked."""

from dataclasses import dataclass
from typing import Literal

from app.errors import Unprocessable
from app.planning import learning_rate
from app.planning.recommendations import recommended_batch
from app.planning.split import Asked, ConflictingBatch, Resolved, check_steps, resolve, without_accumulation
from app.schemas.accumulation import AccumulationConfig, Precision
from app.schemas.architecture import ModelReference
from app.schemas.examples import DataFormat
from app.schemas.spec import AskedSplit, DataSpec, MemoryLimits, OptimizerSpec, ScheduleSpec, Spec
from app.schemas.training import DatasetConfig, TrainingConfig

DEFAULT_EPOCHS = 3
DEFAULT_MAX_LENGTH = 1024
DEFAULT_SAVE_EVERY = 50
DEFAULT_SAFETY_MARGIN = 0.1
"""Where no prediction was compared with a measurement yet."""


@dataclass(frozen=True)
class Data:
    """The stored training file."""

    file_id: str
    sha256: str
    format: DataFormat
    examples: int


def resolve_batch(config: AccumulationConfig, devices: int, recommended: int) -> Resolved:
    """The effective batch that a configuration means.

    Raises:
        Unprocessable: its numbers exclude each other.
    """
    asked = Asked(
        config.target_effective_batch_size, config.accumulation_steps, config.micro_batch_size, devices
    )
    try:
        resolved = (
            resolve(asked, recommended)
            if config.use_gradient_accumulation
            else without_accumulation(asked, recommended)
        )
        if resolved.micro_batch:
            check_steps(
                -(-resolved.effective_batch_size // (resolved.micro_batch * devices)), resolved.micro_batch
            )
    except ConflictingBatch as error:
        raise Unprocessable(f"{error}.", field=error.field) from None
    return resolved


def max_length_for(asked: int | None, model: ModelReference) -> int:
    """The longest sequence, in tokens.

    Raises:
        Unprocessable: longer than the model's positions.
    """
    positions = model.architecture.positions
    if asked is not None and asked > positions:
        raise Unprocessable(
            f"max_length {asked} is longer than {model.name}'s {positions} positions: lower it, or choose a "
            "model with a longer context.",
            field="dataset_config.max_length",
        )
    return asked or min(positions, DEFAULT_MAX_LENGTH)


def freeze(
    model: ModelReference,
    data: Data,
    dataset: DatasetConfig,
    config: AccumulationConfig,
    training: TrainingConfig,
    devices: int,
) -> Spec:
    """The spec of a job.

    Raises:
        Unprocessable: values that exclude each other, or that the model or the data do not allow.
    """
    samples = data.examples if dataset.overlength != "split" else None
    batch = resolve_batch(config, devices, recommended_batch(samples))
    return Spec(
        model=model,
        data=_data(data, dataset, model),
        seed=training.seed,
        effective_batch_size=batch.effective_batch_size,
        epochs=None if training.max_steps else (training.epochs or DEFAULT_EPOCHS),
        max_steps=training.max_steps,
        optimizer=_optimizer(training, config, batch.effective_batch_size),
        schedule=ScheduleSpec(
            name=training.lr_scheduler,
            warmup_steps=training.warmup_steps,
            warmup_ratio=training.warmup_ratio or 0.0,
        ),
        gradient_clipping=config.gradient_clipping,
        clip_mode=config.clip_mode,
        precision=_precision(config),
        gradient_checkpointing=training.gradient_checkpointing,
        attention=training.attention,
        freeze=tuple(training.freeze),
        save_every=training.save_every or DEFAULT_SAVE_EVERY,
        timeout_seconds=training.timeout_seconds,
        split=AskedSplit(accumulation_steps=batch.steps, micro_batch_size=batch.micro_batch, devices=devices),
        memory=memory_limits(config.max_memory_usage, config.memory_safety_margin),
        auto_adjust_batch_size=config.auto_adjust_batch_size,
        log_memory_usage=config.log_memory_usage,
    )


def memory_limits(max_memory_usage: float, margin: float | None) -> MemoryLimits:
    """The share of a device that may be used, with the default margin where none was given."""
    return MemoryLimits(
        max_memory_usage=max_memory_usage,
        memory_safety_margin=DEFAULT_SAFETY_MARGIN if margin is None else margin,
    )


def _data(data: Data, dataset: DatasetConfig, model: ModelReference) -> DataSpec:
    if dataset.format not in (None, data.format):
        raise Unprocessable(
            f"The file's lines are of format {data.format}, not {dataset.format}: leave format out, or "
            "upload the file as you mean it.",
            field="dataset_config.format",
        )
    return DataSpec(
        file_id=data.file_id,
        sha256=data.sha256,
        format=data.format,
        examples=data.examples,
        max_length=max_length_for(dataset.max_length, model),
        overlength=dataset.overlength,
    )


def _precision(config: AccumulationConfig) -> Literal["auto"] | Precision:
    if isinstance(config.mixed_precision, bool):
        return "auto" if config.mixed_precision else "no"
    return config.mixed_precision


def _optimizer(training: TrainingConfig, config: AccumulationConfig, effective_batch: int) -> OptimizerSpec:
    scale = 1.0
    if config.gradient_scaling and config.base_batch_size:
        scale = learning_rate.scale(config.lr_scaling, effective_batch / config.base_batch_size)
    arguments = training.optimizer_args
    return OptimizerSpec(
        name=training.optimizer,
        learning_rate=training.learning_rate * scale,
        weight_decay=training.weight_decay,
        betas=arguments.betas or (0.9, 0.999),
        eps=arguments.eps or 1e-8,
        momentum=arguments.momentum or 0.0,
    )
