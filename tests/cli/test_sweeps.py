"""The values of `accrue sweep --vary`."""

from types import SimpleNamespace
from typing import Any

import pytest
import typer

from app.cli import sweeps
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


def test_a_sweep_is_announced_and_followed_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(*statuses: str) -> dict[str, Any]:
        jobs = [
            {"training_id": f"ftjob-{n}", "status": status, "step": 0, "steps_total": 1}
            for n, status in enumerate(statuses)
        ]
        return {"name": "first", "jobs": jobs}

    answers = iter([sweep("running", "queued"), sweep("succeeded", "running"), sweep("succeeded", "failed")])
    client = SimpleNamespace(get_patiently=lambda path, notify: next(answers))
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(sleep=lambda _: None))
    sweeps._announce(sweep("queued", "queued"))
    ended = sweeps._wait(client, sweep("queued", "queued"), quiet=False)  # type: ignore[arg-type]
    assert [job["status"] for job in ended["jobs"]] == ["succeeded", "failed"]
    shown = capsys.readouterr().err
    assert "first: 2 jobs (ftjob-0, ftjob-1)" in shown
    assert "first: 1 of 2 jobs have ended" in shown
