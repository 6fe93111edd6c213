"""How `accrue submit` merges `--set` with its own options."""

from copy import deepcopy
from typing import Any

import pytest
import typer

from app.cli.submit import _given, _set, plan
from app.contract.architecture import BUILT_IN_MODEL

BODY: dict[str, Any] = {
    "model_name": BUILT_IN_MODEL,
    "dataset_config": {"file_id": "file-1", "max_length": 32, "overlength": "split"},
    "training_config": {"method": "lora", "learning_rate": 1.0},
    "target_effective_batch_size": 8,
    "dry_run": False,
}


def merged(*settings: str) -> dict[str, Any]:
    body = deepcopy(BODY)
    for each in settings:
        _set(body, each, _given(BODY))
    return body


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("seed=3", {"seed": 3}),
        ("dry_run=true", {"dry_run": True}),
        ("target_effective_batch_size=8", {}),
        ("training_config.learning_rate=1", {}),
        ("model_name=gpt2", {"model_name": "gpt2"}),
        (
            "training_config.method.lora.r=32",
            {"training_config": {"method": {"lora": {"r": 32}}, "learning_rate": 1.0}},
        ),
        (
            'training_config.method={"lora": {"r": 32}}',
            {"training_config": {"method": {"lora": {"r": 32}}, "learning_rate": 1.0}},
        ),
        (
            "dataset_config.overlength=error",
            {"dataset_config": {**BODY["dataset_config"], "overlength": "error"}},
        ),
        ("metadata.note=a b", {"metadata": {"note": "a b"}}),
    ],
)
def test_settings_are_added_to_the_options(setting: str, changed: dict[str, Any]) -> None:
    assert merged(setting) == {**BODY, **changed}


def test_the_last_of_two_equal_settings_counts() -> None:
    assert merged("seed=3", "seed=4")["seed"] == 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("target_effective_batch_size=16", "target_effective_batch_size is 8 by an option"),
        ("training_config.method=full", "training_config.method is lora by an option"),
        ("training_config.method.qlora.r=4", "training_config.method is lora by an option"),
        ('training_config.method={"qlora": {}}', "training_config.method is lora by an option"),
        ("training_config.learning_rate=true", "training_config.learning_rate is 1.0 by an option"),
        ('training_config={"epochs": 1}', "fields of training_config are given by an option"),
        ("dataset_config.max_length=64", "dataset_config.max_length is 32 by an option"),
        ("dataset_config.file_id=file-2", "dataset_config.file_id is file-1 by an option"),
        ('dataset_config={"packing": true}', "fields of dataset_config are given by an option"),
    ],
)
def test_a_field_has_one_value(setting: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        merged(setting)


def test_a_configuration_for_another_tool_needs_the_batch() -> None:
    """The message names the option, not the field of the request."""
    with pytest.raises(typer.BadParameter, match="the effective batch that the tool is to train") as caught:
        plan(BUILT_IN_MODEL, emit="trl")
    assert caught.value.param_hint == "--batch"
