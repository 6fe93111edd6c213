from typing import Any

import pytest
from pydantic import ValidationError

from app.contract.accumulation import AccumulationConfig
from app.datasets.dataset_config import DatasetConfig
from app.jobs.request_schemas import TrainingRequest
from app.jobs.training_config import TrainingConfig


@pytest.mark.parametrize("name", ["accumulation_steps", "gradient_accumulation_steps", "grad_accum_steps"])
def test_field_aliases_are_accepted(name: str) -> None:
    assert AccumulationConfig.model_validate({name: 4}).accumulation_steps == 4


@pytest.mark.parametrize("name", ["target_effective_batch_size", "target_batch_size", "effective_batch_size"])
def test_the_target_has_three_names(name: str) -> None:
    assert AccumulationConfig.model_validate({name: 64}).target_effective_batch_size == 64


def test_the_old_name_of_the_clip_mode() -> None:
    config = AccumulationConfig.model_validate({"clip_gradients_before_accumulation": True})
    assert config.clip_mode == "each_micro_batch"


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulation_steps": 0}, {"accumulation_steps": -1}, {"accumulation_steps": 4097},
        {"gradient_clipping": 0}, {"max_memory_usage": 1.5}, {"gradient_clipping": float("nan")},
        {"sync_gradients": False}, {"no_such_field": 1}, {"mixed_precision": "int4"},
    ],
)  # fmt: skip
def test_invalid_values_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AccumulationConfig.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"texts": []},
        {"texts": [""]},
        {"texts": ["a"], "file_id": "file-1"},
        {"file_id": "../etc/passwd"},
        {"texts": ["a"], "format": "messages"},
    ],
)
def test_exactly_one_data_source_is_required(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DatasetConfig.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"epochs": 1, "max_steps": 1}, {"warmup_steps": 1, "warmup_ratio": 0.1}, {"learning_rate": 0},
        {"optimizer": "sgd", "optimizer_args": {"betas": [0.9, 0.99]}}, {"epochs": -1}, {"steps": -3},
    ],
)  # fmt: skip
def test_contradictory_training_configurations_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig.model_validate(fields)


@pytest.mark.parametrize("name", ["../x", "/abs", "a/b/c", "a\\b", "", ".hidden", "a/..", "x" * 300])
def test_a_model_name_must_not_be_a_path(name: str) -> None:
    with pytest.raises(ValidationError):
        TrainingRequest.model_validate({"model_name": name, "dataset_config": {"texts": ["a"]}})
