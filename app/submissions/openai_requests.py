"""Translates requests of OpenAI's clients into native ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from app.errors import AccrueError, Unprocessable
from app.jobs.openai_schemas import FineTuningRequest, Hyperparameters
from app.jobs.request_schemas import TrainingRequest
from app.jobs.training_config import LEAST_LEARNING_RATE, MOST_LEARNING_RATE
from app.planning.inputs import PlanningInputs
from app.planning.learning_rate import openai_base_rate
from app.planning.recommendations import recommended_rate
from app.settings import Settings
from app.submissions import admission
from app.submissions.admission import AdmittedRequest

_OPENAI_FIELDS = {
    "model_name": "model",
    "dataset_config.file_id": "training_file",
    "dataset_config.validation_file_id": "validation_file",
    "target_effective_batch_size": "hyperparameters.batch_size",
}


def check(requested: FineTuningRequest, inputs: PlanningInputs, settings: Settings) -> AdmittedRequest:
    """Checks a request like `admission.check`; `"auto"` becomes the recommendation, and errors name OpenAI's
    fields.

    Raises:
        Unprocessable, NotFound: the request cannot be trained.
    """
    with _openai_field_names(requested):
        return _check(requested, inputs, settings)


def _check(requested: FineTuningRequest, inputs: PlanningInputs, settings: Settings) -> AdmittedRequest:
    native = _to_native(requested)
    checked = admission.check(native, inputs, settings, suffix=requested.suffix)
    spec = checked.submission.spec
    chosen = _hyperparameters(requested)
    if chosen.learning_rate_multiplier != "auto":
        base = requested.training_config.learning_rate
        if "learning_rate" not in requested.training_config.model_fields_set:
            base = openai_base_rate(spec.objective, adapters=spec.method.lora is not None)
        rate = base * chosen.learning_rate_multiplier
        if not LEAST_LEARNING_RATE <= rate <= MOST_LEARNING_RATE:
            raise Unprocessable(
                f"This makes a learning rate of {rate:g}: it must be at least {LEAST_LEARNING_RATE:g} and at "
                f"most {MOST_LEARNING_RATE:g}.",
                field="hyperparameters.learning_rate_multiplier",
            )
        training = native.training_config.model_copy(update={"learning_rate": rate})
        native = native.model_copy(update={"training_config": training})
        checked = admission.check(native, inputs, settings, suffix=requested.suffix)
    elif spec.objective is None and _uses_recommended_rate(requested):
        recommended = recommended_rate(
            spec.model.architecture.parameters,
            spec.optimizer.name,
            spec.effective_batch_size,
            adapters=spec.method.lora is not None,
        )
        training = native.training_config.model_copy(update={"learning_rate": recommended.value})
        native = native.model_copy(update={"training_config": training})
        checked = admission.check(native, inputs, settings, suffix=requested.suffix)
    return checked


@contextmanager
def _openai_field_names(requested: FineTuningRequest) -> Iterator[None]:
    """An error names the field as the client wrote it."""
    names = dict(_OPENAI_FIELDS)
    if requested.method is not None:
        names["training_config.objective"] = "method.type"
    try:
        yield
    except AccrueError as error:
        error.field = names.get(error.field or "", error.field)
        raise


def _to_native(requested: FineTuningRequest) -> TrainingRequest:
    """Translates the request into one of the native API.

    Raises:
        Unprocessable: its fields contradict each other.
    """
    chosen = _hyperparameters(requested)
    given = requested.accumulation.model_dump(exclude_unset=True)
    if chosen.batch_size != "auto":
        _check_agrees(given, "target_effective_batch_size", chosen.batch_size, "hyperparameters.batch_size")
        given["target_effective_batch_size"] = chosen.batch_size
    try:
        return TrainingRequest.model_validate(
            {
                **given,
                "model_name": requested.model,
                "metadata": requested.metadata or {},
                "training_config": _training(requested, chosen),
                "dataset_config": {
                    **requested.dataset_config.model_dump(exclude_unset=True),
                    "file_id": requested.training_file,
                    "validation_file_id": requested.validation_file,
                },
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        raise Unprocessable(f"{message}.", field=".".join(map(str, first["loc"])) or None) from None


def _hyperparameters(requested: FineTuningRequest) -> Hyperparameters:
    """The hyperparameters in either place.

    Raises:
        Unprocessable: both places give one, with different values.
    """
    older = requested.hyperparameters or Hyperparameters()
    if requested.method is None:
        return older
    newer, kind = requested.method.hyperparameters, requested.method.type
    chosen = {}
    for name in Hyperparameters.model_fields:
        own, other = getattr(newer, name), getattr(older, name)
        if "auto" not in (own, other) and own != other:
            raise Unprocessable(
                f"{name} is {other} in hyperparameters and {own} in method.{kind}.hyperparameters: leave one "
                "out.",
                field=f"hyperparameters.{name}",
            )
        chosen[name] = other if own == "auto" else own
    return Hyperparameters(**chosen)


def _check_agrees(given: dict[str, Any], name: str, value: Any, field: str) -> None:
    """Checks that a field has the same value wherever it is given.

    Raises:
        Unprocessable: it has not.
    """
    if given.get(name) not in (None, value):
        raise Unprocessable(f"{field} is {value}, but {name} is {given[name]}: leave one out.", field=field)


def _uses_recommended_rate(requested: FineTuningRequest) -> bool:
    chosen = _hyperparameters(requested).learning_rate_multiplier
    return chosen == "auto" and "learning_rate" not in requested.training_config.model_fields_set


def _with_objective(given: dict[str, Any], requested: FineTuningRequest) -> dict[str, Any]:
    """The training configuration with the objective that the request's method means."""
    if requested.method is None:
        return given
    name = "sft" if requested.method.type == "supervised" else requested.method.type
    _check_agrees(given, "objective", name, "method.type")
    beta = requested.method.dpo.hyperparameters.beta
    if name != "dpo" or beta == "auto":
        return {**given, "objective": name}
    arguments = given.get("objective_args", {})
    _check_agrees(arguments, "beta", beta, "method.dpo.hyperparameters.beta")
    return {**given, "objective": name, "objective_args": {**arguments, "beta": beta}}


def _training(requested: FineTuningRequest, chosen: Hyperparameters) -> dict[str, Any]:
    given = _with_objective(requested.training_config.model_dump(exclude_unset=True), requested)
    if chosen.n_epochs != "auto":
        _check_agrees(given, "epochs", chosen.n_epochs, "hyperparameters.n_epochs")
        given["epochs"] = chosen.n_epochs
    if requested.seed is None:
        return given
    _check_agrees(given, "seed", requested.seed, "seed")
    return {**given, "seed": requested.seed}
