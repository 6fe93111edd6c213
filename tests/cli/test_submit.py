"""How `accrue submit` merges `--set` with its own options."""

from typing import Any

import pytest
import typer

from app.cli.submit import _finite, _set

BY_OPTIONS: dict[str, Any] = {
    "target_effective_batch_size": 8,
    "dry_run": False,
    "training_config": {"method": "lora"},
}


def merged(*settings: str) -> dict[str, Any]:
    body: dict[str, Any] = {**BY_OPTIONS, "training_config": {**BY_OPTIONS["training_config"]}}
    for each in settings:
        _set(body, each, BY_OPTIONS)
    return body


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("seed=3", {"seed": 3}),
        ("dry_run=true", {"dry_run": True}),
        ("target_effective_batch_size=8", {}),
        ("training_config.method.lora.r=32", {"training_config": {"method": {"lora": {"r": 32}}}}),
        ("dataset_config.packing=true", {"dataset_config": {"packing": True}}),
        ("metadata.note=a b", {"metadata": {"note": "a b"}}),
    ],
)
def test_settings_are_added_to_the_options(setting: str, changed: dict[str, Any]) -> None:
    assert merged(setting) == {**BY_OPTIONS, **changed}


def test_the_last_of_two_equal_settings_counts() -> None:
    assert merged("seed=3", "seed=4")["seed"] == 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("target_effective_batch_size=16", "target_effective_batch_size is 8 by an option"),
        ("training_config.method=full", "training_config.method is lora by an option"),
        ("training_config.method.qlora.r=4", "training_config.method is lora by an option"),
    ],
)
def test_a_field_has_one_value(setting: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        merged(setting)


def test_options_are_finite_numbers() -> None:
    assert [_finite(each) for each in (None, 0.5)] == [None, 0.5]
    with pytest.raises(typer.BadParameter, match="nan is not a finite number"):
        _finite(float("nan"))
