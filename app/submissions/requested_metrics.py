"""The operator's own metrics that a job requests."""

from app.contract.metric_programs import metric_programs
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.settings import Settings

DEFAULT_COMPLETIONS = 20
"""How many held-out prompts are completed for metrics, if the request does not say."""

_FIELD = "training_config.metrics"


def with_metrics(training: TrainingConfig, *, validates: bool, settings: Settings) -> TrainingConfig:
    """The training configuration, with enough completions for its metrics.

    Raises:
        Unprocessable: this service does not have the metric, or there is no data to compute it on.
    """
    if not training.metrics:
        return training
    there = metric_programs(settings.metric_programs_dir)
    for name in training.metrics:
        if name not in there:
            known = (
                f"there are {', '.join(sorted(there))}" if there else "ACCRUE_METRIC_PROGRAMS_DIR holds none"
            )
            raise Unprocessable(f"There is no metric {name}: {known}.", field=_FIELD)
    if not validates:
        raise Unprocessable(
            "metrics score completions of held-out prompts: set validation_split or validation_file_id in "
            "dataset_config.",
            field=_FIELD,
        )
    if training.compile:
        raise Unprocessable(
            "metrics need completions, which a compiled model does not make: leave compile out.", field=_FIELD
        )
    if "completions" in training.model_fields_set:
        if not training.completions:
            raise Unprocessable(
                "metrics score completions, and completions is 0: leave it out.", field=_FIELD
            )
        return training
    return training.model_copy(update={"completions": DEFAULT_COMPLETIONS})
