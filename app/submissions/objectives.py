"""The objective of a job, from the request and the format of its data."""

from collections.abc import Sequence

from app.contract.arguments import reject_unknown_arguments
from app.contract.data_formats import MAX_BYTES_OF_CLASSES, MAX_CLASSES, DataFormat
from app.contract.objective import (
    DEFAULT_OBJECTIVES,
    FORMATS,
    OBJECTIVE_ARGUMENTS,
    OF_SEQUENCES,
    ObjectiveName,
    ObjectiveSpec,
)
from app.contract.spec import DataSpec
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning.learning_rate import default_rate

_FIELD = "training_config.objective"
_SHAPES: dict[DataFormat, str] = {
    "preference": 'pairs: each line has a prompt (or messages), "chosen" and "rejected"',
    "unpaired_preference": "labelled answers: each line has a prompt and a completion (or messages), and "
    '"label" as true or false',
    "classification": 'labelled texts: each line has "text", and "label" as text, a whole number, '
    "or true or false",
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
    if name in OF_SEQUENCES and training.metrics:
        raise Unprocessable(
            f"metrics score completions, but a model for {name} completes nothing: leave them out.",
            field="training_config.metrics",
        )
    if name not in ("sft", "classification"):
        if training.label_smoothing:
            own = " (for dpo: objective_args.label_smoothing)" if name == "dpo" else ""
            raise Unprocessable(
                f"label_smoothing spreads the probability of target tokens, which {name} does not use: leave "
                f"it out{own}.",
                field="training_config.label_smoothing",
            )
        if "learning_rate" not in training.model_fields_set:
            changes["learning_rate"] = default_rate(name, adapters=training.method != "full")
    return training.model_copy(update=changes)


def warning_of_labels(unused_keys: Sequence[str], objective: ObjectiveName | None) -> str | None:
    """A warning if lines have labels of a kind that no objective learns from.

    Args:
        unused_keys: the keys of the lines that training ignores.
    """
    if "label" not in unused_keys:
        return None
    return (
        f"the field label is ignored, and {objective or 'sft'} learns from every line alike: answers that "
        "are good or bad (kto) need true or false as their label, and texts of classes (classification) need "
        "text, a whole number, or true or false"
    )


def warning_of_questions(unused_keys: Sequence[str], data_format: DataFormat | None) -> str | None:
    """A warning if lines with answers have a field that looks like their prompt, or a part of it, and is not
    read.

    Args:
        unused_keys: the keys of the lines that training ignores.
    """
    if data_format not in _WITH_PROMPTS:
        return None
    parts = [key for key in unused_keys if key.lower() in _PARTS_OF_PROMPTS]
    prompts = [key for key in unused_keys if key.lower() in _PROMPTS] if data_format == "preference" else []
    if prompts:
        prompts, parts = prompts[:1], [*prompts[1:], *parts]
        also = f"; {_fields(parts)} ignored, too" if parts else ""
        return (
            f"{_fields(prompts)} ignored: if {prompts[0]} is the prompt of both answers, say so when you "
            f"upload the file (accrue submit --column prompt={prompts[0]}){also}"
        )
    return f"{_fields(parts)} ignored: what belongs to the prompt must be in it" if parts else None


def _fields(names: Sequence[str]) -> str:
    return f"the field {names[0]} is" if len(names) == 1 else f"the fields {' and '.join(names)} are"


_WITH_PROMPTS: tuple[DataFormat, ...] = ("prompt_completion", "preference", "unpaired_preference")
_PROMPTS = {"question", "query", "problem", "instruction", "user"}
_PARTS_OF_PROMPTS = {"system", "system_prompt", "context", "input"}
"""Common names of prompts, and of their parts."""


def objective_spec(training: TrainingConfig) -> ObjectiveSpec | None:
    """The objective of a resolved configuration; None for supervised fine-tuning.

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
    return ObjectiveSpec(name=name, **{**OBJECTIVE_ARGUMENTS[name], **given})


def data_for(
    data: DataSpec,
    objective: ObjectiveSpec | None,
    classes: Sequence[str] | None = None,
    of_validation: Sequence[str] | None = None,
) -> DataSpec:
    """The data as an objective needs it.

    Args:
        classes: the labels of the training file, in order; None if it has none, or too many.
        of_validation: those of the validation file.

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
            f"overlength: split divides samples, but {objective.name} needs whole ones: set it to truncate "
            "or error.",
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
    if objective.name == "classification":
        is_own_file = data.validation is not None and data.validation.file_id is not None
        if is_own_file and of_validation is None:
            raise Unprocessable(
                f"The validation file has {_TOO_MANY}, so that some of them are not those of the training "
                "samples.",
                field="dataset_config.validation_file_id",
            )
        return data.model_copy(update={"classes": _classes(classes, of_validation)})
    return data.model_copy(update={"with_mismatches": objective.name == "kto"})


_TOO_MANY = (
    f"more than {MAX_CLASSES:,} different labels, or labels of more than {MAX_BYTES_OF_CLASSES:,} "
    "bytes together"
)


def _classes(classes: Sequence[str] | None, of_validation: Sequence[str] | None) -> tuple[str, ...]:
    """The classes that a classifier chooses from.

    Raises:
        Unprocessable: there are too many or too few, or the validation file has others.
    """
    if classes is None:
        raise Unprocessable(
            f"The file has {_TOO_MANY}, too many to classify: if they are not classes, set objective to sft, "
            "which ignores them.",
            field="dataset_config.file_id",
        )
    if len(classes) < 2:
        raise Unprocessable(
            f"Every text has the label {classes[0]!r:.60}: a classifier needs at least two classes. To train "
            "a language model on the texts, set objective to sft.",
            field="dataset_config.file_id",
        )
    unknown = set(of_validation or ()) - set(classes)
    if unknown:
        raise Unprocessable(
            f"The validation file has the label {min(unknown)!r:.60}, which no training sample has.",
            field="dataset_config.validation_file_id",
        )
    return tuple(classes)
