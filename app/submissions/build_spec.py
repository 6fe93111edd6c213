"""Freezes a request: fills in every default, and checks everything that can be checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.contract.accumulation import AccumulationConfig, Precision
from app.contract.data_formats import DataFormat
from app.contract.model_reference import REWARD, ModelReference
from app.contract.objective import ObjectiveSpec
from app.contract.spec import (
    MAX_EVALUATIONS,
    DataSpec,
    Overlength,
    RampSpec,
    RequestedSplit,
    RequestedTune,
    Spec,
    ValidationSpec,
)
from app.datasets.dataset_config import DatasetConfig
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning.defaults import DEFAULT_EPOCHS, DEFAULT_MAX_LENGTH, memory_limits
from app.planning.recommendations import recommended_batch
from app.planning.sharding import why_not_sharded
from app.planning.split import (
    ConflictingBatch,
    RequestedBatch,
    ResolvedBatch,
    check_steps,
    resolve,
    without_accumulation,
)
from app.submissions.adapter_method import method_from
from app.submissions.distribution import Distribution
from app.submissions.objectives import data_for, objective_spec
from app.submissions.optimizer import optimizer_spec, schedule_spec
from app.submissions.tuning import tuning_of

DEFAULT_SAVE_EVERY = 50
DEFAULT_RAMP_FACTOR = 8
"""The default limit of a ramp that follows measurements, as a multiple of the effective batch."""


@dataclass(frozen=True)
class Data:
    """A file of training or validation data, stored or about to be."""

    file_id: str
    sha256: str
    format: DataFormat
    examples: int
    filename: str = ""
    bytes: int = 0
    classes: Sequence[str] | None = None
    """The classes of its labelled texts, in order; None if it has none, or too many."""

    def overlength(self) -> Overlength:
        """What happens to samples that are too long, if the request does not say."""
        is_document = self.format == "text" and self.filename.lower().endswith((".txt", ".md"))
        return "split" if is_document else "truncate"


def resolve_batch(
    config: AccumulationConfig, devices: int, recommended: int, by_device: Sequence[int] | None = None
) -> ResolvedBatch:
    """The effective batch that a configuration means.

    Args:
        by_device: the accumulation steps of each device, if they are given so.

    Raises:
        Unprocessable: its numbers contradict each other.
    """
    target, micro = config.target_effective_batch_size, config.micro_batch_size
    if by_device is None:
        requested = RequestedBatch(target, config.accumulation_steps, micro, devices)
    elif max(by_device) == 1 and not config.use_gradient_accumulation:
        requested = RequestedBatch(target, 1, micro, len(by_device))
    else:
        requested, devices = RequestedBatch(target, sum(by_device), micro), 1
    try:
        resolved = (
            resolve(requested, recommended)
            if config.use_gradient_accumulation
            else without_accumulation(requested, recommended)
        )
        if resolved.micro_batch:
            check_steps(
                -(-resolved.effective_batch_size // (resolved.micro_batch * devices)), resolved.micro_batch
            )
    except ConflictingBatch as error:
        raise Unprocessable(f"{error}.", field=error.field) from None
    return resolved


def max_length_for(
    requested: int | None, model: ModelReference, field: str = "dataset_config.max_length"
) -> int:
    """The longest sequence, in tokens.

    Raises:
        Unprocessable: longer than the model's context length.
    """
    positions = model.architecture.positions
    if requested is not None and requested > positions:
        raise Unprocessable(
            f"max_length {requested} is longer than {model.name}'s context of {positions} tokens: lower it, "
            "or choose a model with a longer context.",
            field=field,
        )
    return requested or min(positions, DEFAULT_MAX_LENGTH)


def _check_evaluations(spec: Spec) -> None:
    """Checks that a job does not evaluate too often.

    Raises:
        Unprocessable: it would.
    """
    known = spec.max_steps is not None or spec.data.overlength != "split"
    if spec.eval_every is None or not known:
        return
    steps = spec.steps_for(spec.data.examples - spec.data.held_out())
    if steps // spec.eval_every > MAX_EVALUATIONS:
        least = -(-steps // MAX_EVALUATIONS)
        raise Unprocessable(
            f"eval_every {spec.eval_every} would evaluate {steps // spec.eval_every:,} times in {steps:,} "
            f"steps, more than {MAX_EVALUATIONS:,}: set eval_every to at least {least}.",
            field="training_config.eval_every",
        )


def build_spec(
    model: ModelReference,
    data: Data,
    validation: Data | None,
    dataset: DatasetConfig,
    config: AccumulationConfig,
    training: TrainingConfig,
    distribution: Distribution,
    *,
    profile: bool = False,
    tune: RequestedTune | None = None,
    measured_margin: float | None = None,
) -> Spec:
    """The spec of a job.

    Args:
        measured_margin: the share of memory to keep free, from the errors of predictions so far.

    Raises:
        Unprocessable: values contradict each other, or the model or the data do not allow them.
    """
    objective = objective_spec(training)
    _check_model(model, objective)
    of_validation = None if validation is None else validation.classes
    own = data_for(_data(data, validation, dataset, model), objective, data.classes, of_validation)
    _check_options(config, training, own)
    if model.layers and model.scores and model.scores != (own.classes or (REWARD,)):
        raise Unprocessable(
            f"{model.name} has other scores ({', '.join(model.scores)[:200]}) than this job would train: "
            "start from a language model, or from a model that was saved whole, not from adapters or a "
            "checkpoint.",
            field="model_name",
        )
    samples = data.examples - own.held_out()
    distribution.check(samples)
    by_device = distribution.steps_by_device
    batch = resolve_batch(
        config,
        1 if distribution.independent else distribution.devices,
        recommended_batch(None if own.overlength == "split" else samples),
        by_device,
    )
    own_tune = tuning_of(tune, batch, config, training, distribution)
    spec = Spec(
        model=model,
        data=own,
        seed=training.seed,
        method=method_from(model, training),
        effective_batch_size=batch.effective_batch_size,
        ramp=_ramp(config, batch.effective_batch_size),
        epochs=None if training.max_steps else (training.epochs or DEFAULT_EPOCHS),
        max_steps=training.max_steps,
        optimizer=optimizer_spec(training, config, batch.effective_batch_size),
        schedule=schedule_spec(training),
        objective=objective,
        label_smoothing=training.label_smoothing,
        aux_scope=training.aux_scope,
        gradient_clipping=config.gradient_clipping,
        clip_mode=config.clip_mode,
        loss_spike_zscore=config.loss_spike_zscore,
        precision=_precision(config),
        accumulate_in_fp32=config.accumulate_in_fp32,
        accumulate_gradients_on_cpu=config.accumulate_gradients_on_cpu,
        use_cpu_offload=config.use_cpu_offload,
        gradient_checkpointing=training.gradient_checkpointing,
        attention=training.attention,
        kernels=training.kernels,
        compile=training.compile,
        freeze=tuple(training.freeze),
        eval_every=training.eval_every,
        early_stopping=training.early_stopping,
        save_every=training.save_every or DEFAULT_SAVE_EVERY,
        timeout_seconds=training.timeout_seconds,
        certificate=config.equivalence_check,
        noise_scale_every=config.noise_scale_every,
        split=RequestedSplit(
            accumulation_steps=batch.steps if by_device is None else max(by_device),
            micro_batch_size=batch.micro_batch,
            devices=distribution.devices,
            steps_by_device=None if by_device is None else tuple(by_device),
        ),
        memory=memory_limits(config.max_memory_usage, config.memory_safety_margin, measured_margin),
        auto_adjust_batch_size=config.auto_adjust_batch_size,
        log_accumulation=config.log_accumulation,
        log_memory_usage=config.log_memory_usage,
        log_micro_losses=config.log_micro_losses,
        log_gradients=config.log_gradients,
        report_to=tuple(training.report_to),
        completions=training.completions if _can_complete(own, objective, training) else 0,
        metrics=tuple(dict.fromkeys(training.metrics)),
        profile=profile,
        deterministic=training.deterministic,
        tune=own_tune,
        strategy=distribution.strategy,
        average=distribution.average,
        zero_stage=distribution.zero_stage,
        gradient_compression=distribution.gradient_compression,
    )
    _check_evaluations(spec)
    if distribution.strategy == "fsdp" and (why := why_not_sharded(spec)) is not None:
        raise Unprocessable(f"{why}.", field="distributed")
    return spec


def _check_model(model: ModelReference, objective: ObjectiveSpec | None) -> None:
    """Checks that the objective can train the model further.

    Raises:
        Unprocessable: it scores texts, and the objective needs a model that predicts tokens.
    """
    if model.scores and (objective is None or not objective.scores_sequences):
        raise Unprocessable(
            f"{model.name} scores texts and predicts no tokens: train it further with classification or "
            "reward, or choose a language model.",
            field="model_name",
        )


def _can_complete(data: DataSpec, objective: ObjectiveSpec | None, training: TrainingConfig) -> bool:
    """Whether there are held-out prompts, and a model that can complete them."""
    predicts_tokens = objective is None or not objective.scores_sequences
    return data.validation is not None and not training.compile and predicts_tokens


def _check_options(config: AccumulationConfig, training: TrainingConfig, data: DataSpec) -> None:
    if config.use_cpu_offload and training.optimizer == "adamw_8bit":
        raise Unprocessable(
            "use_cpu_offload: adamw_8bit runs only on a GPU: choose adamw, whose states then take no GPU "
            "memory at all.",
            field="use_cpu_offload",
        )
    for field in ("early_stopping", "eval_every"):
        if getattr(training, field) is not None and data.validation is None:
            raise Unprocessable(
                f"{field} needs validation data: set validation_split or validation_file_id in "
                "dataset_config.",
                field=f"training_config.{field}",
            )
    if training.compile and data.packing:
        raise Unprocessable(
            "compile and packing cannot be combined: each packed row has a different shape.",
            field="training_config.compile",
        )


def _data(data: Data, validation: Data | None, dataset: DatasetConfig, model: ModelReference) -> DataSpec:
    if dataset.format not in (None, data.format):
        raise Unprocessable(
            f"The file's lines are of format {data.format}, not {dataset.format}: leave format out, or "
            "upload a file in that format.",
            field="dataset_config.format",
        )
    if dataset.validation_split is not None and data.examples < 2:
        raise Unprocessable(
            "validation_split needs at least two samples: one to train on and one to evaluate on.",
            field="dataset_config.validation_split",
        )
    return DataSpec(
        file_id=data.file_id,
        sha256=data.sha256,
        format=data.format,
        examples=data.examples,
        max_length=max_length_for(dataset.max_length, model),
        overlength=dataset.overlength or data.overlength(),
        packing=dataset.packing,
        validation=_validation(validation, dataset.validation_split),
    )


def _validation(file: Data | None, share: float | None) -> ValidationSpec | None:
    if file is not None:
        return ValidationSpec(file_id=file.file_id, sha256=file.sha256, format=file.format, share=None)
    if share is not None:
        return ValidationSpec(file_id=None, sha256=None, format=None, share=share)
    return None


def _ramp(config: AccumulationConfig, effective_batch: int) -> RampSpec:
    limit = config.max_effective_batch_size or DEFAULT_RAMP_FACTOR * effective_batch
    if limit < effective_batch:
        raise Unprocessable(
            f"max_effective_batch_size {limit} is smaller than the effective batch of {effective_batch}: "
            "raise it, or lower the target.",
            field="max_effective_batch_size",
        )
    return RampSpec(
        name=config.accumulation_scheduler,
        warmup_steps=config.accumulation_warmup_steps,
        loss_variance_threshold=config.loss_variance_threshold,
        max_effective_batch_size=limit,
    )


def _precision(config: AccumulationConfig) -> Literal["auto"] | Precision:
    if isinstance(config.mixed_precision, bool):
        return "auto" if config.mixed_precision else "no"
    return config.mixed_precision
