"""The values of `accrue sweep --vary`."""

from typing import Any

import pytest
import typer

from app.cli.sweeps import _values


@pytest.mark.parametrize(
    ("given", "field", "values"),
    [
        ("learning_rate=1e-5,1e-4", "learning_rate", [1e-5, 1e-4]),
        ("training_config.optimizer=adamw,lion", "training_config.optimizer", ["adamw", "lion"]),
        ('x=full,{"lora": {"r": 4, "alpha": 8}}', "x", ["full", {"lora": {"r": 4, "alpha": 8}}]),
        ("x=[1,2],[3]", "x", [[1, 2], [3]]),
        ("x=7b,8", "x", ["7b", 8]),
        ('x="a,b",null,true', "x", ["a,b", None, True]),
        ("x=1, 2", "x", [1, 2]),
        ("x=a=b,c", "x", ["a=b", "c"]),
        ("x={,}", "x", ["{", "}"]),
    ],
)
def test_values_are_json_or_text(given: str, field: str, values: list[Any]) -> None:
    assert _values(given) == (field, values)


@pytest.mark.parametrize("given", ["x", "=1", "x=", ""])
def test_other_forms_are_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="FIELD=VALUE,VALUE"):
        _values(given)
