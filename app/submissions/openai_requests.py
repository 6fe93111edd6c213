"""What OpenAI's clients ask for, in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from app.errors import AccrueError, Unprocessable
from app.jobs.openai_schemas import FineTuningRequest, Hyperparameters
from app.jobs.schemas import TrainingRequest
from app.planning.inputs import Foresight
from app.planning.learning_rate import DEFAULT_LEARNING_RATE
from app.planning.recommendations import recommended_rate
from app.settings import Settings
from app.submissions import admission
from app.submissions.admission import Checked

_THEIR_FIELDS = {
    "model_name": "model",
    "dataset_config.file_id": "training_file",
    "dataset_config.validation_file_id": "validation_file",
    "target_effective_batch_size": "hyperparameters.batch_size",
}


def check(asked: FineTuningRequest, foresight: Foresight, settings: Settings) -> Checked:
    """As `intake.check`, with the recommendation for what is `"auto"`; errors name OpenAI's fields.

    Raises:
        Unprocessable, NotFound: what is asked for cannot be trained.
    """
    with _fields_in_their_words():
        return _check(asked, foresight, settings)


def _check(asked: FineTuningRequest, foresight: Foresight, settings: Settings) -> Checked:
    native = _in_our_words(asked)
    checked = admission.check(native, foresight, settings, suffix=asked.suffix)
    if _rate_is_ours(asked):
        spec = checked.submission.spec
        rate = recommended_rate(
            spec.model.architecture.parameters,
            spec.optimizer.name,
            spec.effective_batch_size,
            adapters=spec.method.lora is not None,
        )
        training = native.training_config.model_copy(update={"learning_rate": rate.value})
        native = native.model_copy(update={"training_config": training})
        checked = admission.check(native, foresight, settings, suffix=asked.suffix)
    return checked


@contextmanager
def _fields_in_their_words() -> Iterator[None]:
    """An error names the field as the client wrote it."""
    try:
        yield
    except AccrueError as error:
        error.field = _THEIR_FIELDS.get(error.field or "", error.field)
        raise


def _in_our_words(asked: FineTuningRequest) -> TrainingRequest:
    """The same request on the native surface.

    Raises:
        Unprocessable: its parts exclude each other.
    """
    chosen = _hyperparameters(asked)
    given = asked.accumulation.model_dump(exclude_unset=True)
    if chosen.batch_size != "auto":
        given["target_effective_batch_size"] = chosen.batch_size
    try:
        return TrainingRequest.model_validate(
            {
                **given,
                "model_name": asked.model,
                "metadata": asked.metadata or {},
                "training_config": _training(asked, chosen),
                "dataset_config": {
                    **asked.dataset_config.model_dump(exclude_unset=True),
                    "file_id": asked.training_file,
                    "validation_file_id": asked.validation_file,
                },
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        raise Unprocessable(f"{message}.", field=".".join(map(str, first["loc"])) or None) from None


def _hyperparameters(asked: FineTuningRequest) -> Hyperparameters:
    if asked.method is not None:
        return asked.method.supervised.hyperparameters
    return asked.hyperparameters or Hyperparameters()


def _rate_is_ours(asked: FineTuningRequest) -> bool:
    chosen = _hyperparameters(asked).learning_rate_multiplier
    return chosen == "auto" and "learning_rate" not in asked.training_config.model_fields_set


def _training(asked: FineTuningRequest, chosen: Hyperparameters) -> dict[str, Any]:
    given = asked.training_config.model_dump(exclude_unset=True)
    if chosen.n_epochs != "auto":
        given["epochs"] = chosen.n_epochs
    if chosen.learning_rate_multiplier != "auto":
        base = given.get("learning_rate", DEFAULT_LEARNING_RATE)
        given["learning_rate"] = base * chosen.learning_rate_multiplier
    return given if asked.seed is None else {**given, "seed": asked.seed}
