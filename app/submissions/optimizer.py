"""Optimizer and schedule with every argument filled in."""

from app.contract.accumulation import AccumulationConfig
from app.contract.arguments import (
    OPTIMIZER_ARGUMENTS,
    SCHEDULE_ARGUMENTS,
)
from app.contract.spec import (
    OptimizerSpec,
    ScheduleSpec,
)
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning import learning_rate


def optimizer_spec(
    training: TrainingConfig, config: AccumulationConfig, effective_batch: int
) -> OptimizerSpec:
    """The optimizer of a job, with the learning rate for its effective batch.

    Raises:
        Unprocessable: nesterov without a momentum.
    """
    scale = 1.0
    if config.gradient_scaling and config.base_batch_size:
        scale = learning_rate.scale(config.lr_scaling, effective_batch / config.base_batch_size)
    own = OPTIMIZER_ARGUMENTS[training.optimizer] | training.optimizer_args.model_dump(exclude_none=True)
    unused = dict.fromkeys(("betas", "eps", "momentum", "nesterov", "trust_coefficient"))
    if own.get("nesterov") and not own.get("momentum"):
        raise Unprocessable(
            "nesterov needs a momentum: set optimizer_args.momentum.", field="training_config.optimizer_args"
        )
    return OptimizerSpec(
        name=training.optimizer,
        learning_rate=training.learning_rate * scale,
        weight_decay=training.weight_decay,
        decays_biases=False,
        **{**unused, **own},
    )


def schedule_spec(training: TrainingConfig) -> ScheduleSpec:
    """The learning-rate schedule of a job."""
    given = training.lr_scheduler_args.model_dump(exclude_none=True)
    own = {**SCHEDULE_ARGUMENTS[training.lr_scheduler], **given}
    if training.warmup_shape == "constant" and "warmup_start" not in given:
        own["warmup_start"] = 0.1  # with 0, a constant warmup would only be a delay
    unused = {"warmup_start": 0.0, "final": 0.0, "pct_start": 0.0, "div_factor": 1.0, "final_div_factor": 1.0}
    return ScheduleSpec(
        name=training.lr_scheduler,
        warmup_steps=training.warmup_steps,
        warmup_ratio=training.warmup_ratio or 0.0,
        warmup_rounds_up=True,
        warmup_shape=training.warmup_shape,
        **{**unused, **own},
    )
