"""Whether and how a job measures which micro-batches are fastest."""

from app.contract.accumulation import AccumulationConfig
from app.contract.spec import RequestedTune, Tune
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning.split import ResolvedBatch
from app.submissions.distribution import Distribution


def tuning_of(
    requested: RequestedTune | None,
    batch: ResolvedBatch,
    config: AccumulationConfig,
    training: TrainingConfig,
    distribution: Distribution,
) -> Tune | None:
    """How the job tunes its micro-batches; None: not at all. If nothing is requested, it tunes while
    training wherever that changes the result only by rounding (and the random numbers of dropout).

    Raises:
        Unprocessable: tuning is requested, but the job does not leave the micro-batch open.
    """
    if requested == "off":
        return None
    if requested is not None:
        _check_tunable(requested, batch, config, training, distribution)
        return requested
    is_open = batch.steps is None and batch.micro_batch is None and distribution.steps_by_device is None
    several = distribution.devices != 1 or distribution.independent
    fixed = several or training.compile or training.deterministic
    changes = config.clip_mode == "each_micro_batch" or config.accumulation_scheduler == "noise_scale"
    return "while_training" if is_open and not fixed and not changes else None


def _check_tunable(
    tune: Tune,
    batch: ResolvedBatch,
    config: AccumulationConfig,
    training: TrainingConfig,
    distribution: Distribution,
) -> None:
    if tune == "while_training" and (distribution.devices != 1 or distribution.independent):
        raise Unprocessable(
            "tune while_training needs a single device: leave it out, or request one device.", field="tune"
        )
    if tune != "only" and config.clip_mode == "each_micro_batch":
        raise Unprocessable(
            "clip_mode each_micro_batch makes the training depend on the micro-batch, which tune chooses by "
            "measured time: leave one of them out.",
            field="tune",
        )
    if tune == "while_training" and config.accumulation_scheduler == "noise_scale":
        raise Unprocessable(
            "accumulation_scheduler noise_scale measures the noise scale with micro-batches, whose size "
            "tune while_training changes: choose another scheduler, or leave tune out.",
            field="tune",
        )
    if tune != "only" and training.deterministic:
        raise Unprocessable(
            "tune chooses micro-batches by their measured speed, so that two runs can differ: leave out tune "
            "or deterministic.",
            field="tune",
        )
    if batch.steps is not None or batch.micro_batch is not None:
        raise Unprocessable(
            "tune chooses the micro-batch: leave accumulation_steps and micro_batch_size out.", field="tune"
        )
    if training.compile:
        raise Unprocessable(
            "tune and compile cannot be combined: every measured size would have to be compiled. Leave one "
            "of them out.",
            field="tune",
        )
