"""Error messages for invalid requests."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.jobs.openai_schemas import FineTuningRequest
from app.jobs.request_schemas import TrainingRequest
from app.web.validation_errors import field_problems

REQUEST: dict[str, Any] = {"model_name": "gpt2", "dataset_config": {"texts": ["a"]}}


def told(**fields: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as refused:
        TrainingRequest.model_validate(REQUEST | fields)
    return {each.field: each.message for each in field_problems(refused.value.errors(), TrainingRequest)}


METHODS = "input should be 'full', 'lora' or 'qlora'"
PRECISIONS = "input should be a valid boolean or 'bf16', 'fp16', 'no', 'tf32' or 'pure_bf16'"
LORA = "training_config.method.lora"
NUMBER = "input should be a valid integer, unable to parse string as an integer"


def of_method(method: Any) -> dict[str, Any]:
    return {"training_config": {"method": method}}


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"target_batch": 3}, "target_batch", "did you mean target_effective_batch_size?"),
        ({"acumulation_steps": 3}, "acumulation_steps", "did you mean accumulation_steps?"),
        ({"dataset_config": {"file_id": "nope"}}, "dataset_config.file_id", "listed by GET /v1/files"),
        (
            {"model_name": "ft:accrue/tiny-gpt2:other::1"},
            "model_name",
            "give its name (ft:…, as GET /v1/models lists it), or the id of its job (ftjob-…)",
        ),
        ({"quite_another": 3}, "quite_another", "see /docs"),
        (
            {"accumulation_steps": 3, "gradient_accumulation_steps": 3},
            "gradient_accumulation_steps",
            "is another name for accumulation_steps, which is also given: remove one",
        ),
        ({"epochs": 3}, "epochs", "did you mean training_config.epochs?"),
        ({"num_train_epochs": 3}, "num_train_epochs", "did you mean training_config.epochs?"),
        (
            {"training_config": {"tune": "off"}},
            "training_config.tune",
            "tune belongs at the top level of the request, not in training_config",
        ),
        ({"training_config": {"lr": 1}}, "training_config.lr", "did you mean training_config.learning_rate?"),
        (of_method("lorra"), "training_config.method", METHODS),
        (of_method({"lara": {}}), "training_config.method", METHODS),
        (
            of_method({"lora": {"rank": 8}}),
            "training_config.method.lora.rank",
            "training_config.method.lora.r?",
        ),
        (of_method({"lora": {"r": -1}}), "training_config.method.lora.r", "greater than or equal to 1"),
        ({"mixed_precision": "int8"}, "mixed_precision", PRECISIONS),
        (of_method({"lora": {"use_dora": True}}), "training_config.method.lora.use_dora", "see /docs"),
        ({"user_id": [1]}, "user_id", "input should be a valid integer or a valid string"),
        ({"gpu_ids": ["a"]}, "gpu_ids.0", NUMBER),
        ({"model_name": "/models/gpt2"}, "model_name", "there, and give name or owner/name"),
        ({"model_name": "./gpt2"}, "model_name", "there, and give name or owner/name"),
        ({"model_name": "a b"}, "model_name", "or the id of its job (ftjob-…)"),
    ],
)
def test_errors_name_the_field_and_its_allowed_values(
    given: dict[str, Any], field: str, message: str
) -> None:
    found = told(**given)
    assert list(found) == [field]
    assert found[field].endswith(message)


def test_several_errors_are_reported_together() -> None:
    found = told(priority="high", nothing=1, training_config={"method": 3})
    assert set(found) == {"training_config.method", "priority", "nothing"}


def test_a_field_of_the_same_group_is_meant_first() -> None:
    given = {"model": "gpt2", "training_file": "file-1", "hyperparameters": {"epochs": 2}}
    with pytest.raises(ValidationError) as refused:
        FineTuningRequest.model_validate(given)
    [problem] = field_problems(refused.value.errors(), FineTuningRequest)
    assert "did you mean hyperparameters.n_epochs?" in problem.message
