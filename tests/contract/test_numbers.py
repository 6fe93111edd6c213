"""Numbers in requests: true and false are none, although Python counts them among its integers."""

import pytest
from fastapi.testclient import TestClient

from tests.harness.requests import JOB, PATH

BATCH = "target_effective_batch_size"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"batch_size": True}, "micro_batch_size"),
        ({BATCH: False}, BATCH),
        ({"num_gpus": True}, "num_gpus"),
        ({"max_memory_usage": True}, "max_memory_usage"),
        ({"training_config": {"learning_rate": True}}, "training_config.learning_rate"),
        ({"training_config": {"max_steps": True}}, "training_config.max_steps"),
        ({"dataset_config": {"texts": ["a"], "max_length": True}}, "dataset_config.max_length"),
    ],
)
def test_true_is_no_number(client: TestClient, fields: dict[str, object], named: str) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "dry_run": True, **fields})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert named.split(".")[-1] in error["field"] or "batch_size" in error["field"]
    assert error["message"].endswith("must be a number, not true or false")


@pytest.mark.parametrize(
    "fields", [{"num_gpus": 1.0}, {"num_gpus": "1"}, {"use_gradient_accumulation": True}]
)
def test_numbers_in_other_forms_are_understood(client: TestClient, fields: dict[str, object]) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "dry_run": True, **fields})
    assert answer.status_code == 200
