"""The objective of a job, from the request and the format of its data."""

from app.contract.arguments import reject_unknown_arguments
from app.contract.data_formats import DataFormat
from app.contract.objective import (
    DEFAULT_OBJECTIVES,
    FORMATS,
    OBJECTIVE_ARGUMENTS,
    ObjectiveName,
    PreferenceSpec,
)
from app.contract.spec import DataSpec
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning.learning_rate import PREFERENCE_LEARNING_RATE, PREFERENCE_LORA_LEARNING_RATE

_FIELD = "training_config.objective"
_SHAPES: dict[DataFormat, str] = {
    "preference": 'pairs: each line has a prompt (or messages), "chosen" and "rejected"',
    "unpaired_preference": "labelled answers: each line has a prompt and a completion (or messages), and "
    '"label" as true or false',
    "messages": "texts, completions or chats to imitate",
}
"""What a line of a format looks like, for messages."""


def training_for(training: TrainingConfig, data: DataFormat) -> TrainingConfig:
    """The training configuration for data of a format: with its objective, and a learning rate for it.

    Raises:
        Unprocessable: the objective cannot learn from such data, or does not take an argument.
    """
    name: ObjectiveName = training.objective or DEFAULT_OBJECTIVES.get(data, "sft")
    if data not in FORMATS[name]:
        needed = _SHAPES["messages" if name == "sft" else FORMATS[name][0]]
        suitable = ", ".join(each for each, formats in FORMATS.items() if data in formats)
        raise Unprocessable(
            f"{name} learns from {needed}. The file's format is {data}, which suits {suitable}: set "
            "objective to one of these, or leave it out.",
            field=_FIELD,
        )
    changes: dict[str, object] = {"objective": name}
    try:
        allowed = set(OBJECTIVE_ARGUMENTS[name])
        reject_unknown_arguments("objective_args", training.objective_args, allowed, name)
    except ValueError as error:
        raise Unprocessable(f"{error}.", field="training_config.objective_args") from None
    if name != "sft":
        if training.label_smoothing:
            own = " (for dpo: objective_args.label_smoothing)" if name == "dpo" else ""
            raise Unprocessable(
                f"label_smoothing spreads the probability of target tokens, which {name} does not use: leave "
                f"it out{own}.",
                field="training_config.label_smoothing",
            )
        if "learning_rate" not in training.model_fields_set:
            adapters = training.method != "full"
            changes["learning_rate"] = PREFERENCE_LORA_LEARNING_RATE if adapters else PREFERENCE_LEARNING_RATE
    return training.model_copy(update=changes)


def preference_spec(training: TrainingConfig) -> PreferenceSpec | None:
    """The preference objective of a resolved configuration; None for supervised fine-tuning.

    Raises:
        Unprocessable: its arguments leave nothing to learn.
    """
    name = training.objective
    if name is None or name == "sft":
        return None
    given = training.objective_args.model_dump(exclude_none=True)
    if given.get("desirable_weight") == given.get("undesirable_weight") == 0.0:
        raise Unprocessable(
            "desirable_weight and undesirable_weight are both 0: set one of them above 0, so that something "
            "is learned.",
            field="training_config.objective_args",
        )
    return PreferenceSpec(name=name, **{**OBJECTIVE_ARGUMENTS[name], **given})


def data_for(data: DataSpec, objective: PreferenceSpec | None) -> DataSpec:
    """The data as an objective needs it.

    Raises:
        Unprocessable: an option of the data does not suit it.
    """
    if objective is None:
        own = None if data.validation is None else data.validation.format
        if own is not None and own not in FORMATS["sft"]:
            raise Unprocessable(
                f"The validation file's lines are of format {own}, which sft cannot be evaluated on: choose "
                "a file of texts, completions or chats.",
                field="dataset_config.validation_file_id",
            )
        return data
    if data.overlength == "split":
        raise Unprocessable(
            f"overlength: split divides samples, but {objective.name} compares whole answers: set it to "
            "truncate or error.",
            field="dataset_config.overlength",
        )
    if data.validation is not None and data.validation.format not in (None, data.format):
        raise Unprocessable(
            f"The validation file's lines are of format {data.validation.format}, and {objective.name} needs "
            f"{data.format}.",
            field="dataset_config.validation_file_id",
        )
    if objective.name == "kto" and data.examples - data.held_out() < 2:
        raise Unprocessable(
            "kto needs at least two samples to train on: it compares each prompt with another sample's "
            "completion.",
            field="dataset_config.file_id",
        )
    return data.model_copy(update={"with_mismatches": objective.name == "kto"})
