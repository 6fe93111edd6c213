"""The values of `accrue sweep --vary`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.cli import app, sweeps
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


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ([], 0.1),
        (["dataset_config.packing=true"], 0.1),
        (["dataset_config.validation_split=0.2"], None),
        (["dataset_config.validation_file_id=file-1"], None),
        (['dataset_config={"validation_split": 0.2}'], None),
    ],
)
def test_jobs_are_compared_on_held_out_samples_unless_set_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: list[str], share: float | None
) -> None:
    given: dict[str, Any] = {}

    def submit_file(
        client: Any, file: Path, model: str, batch: None, dataset: dict[str, Any], *rest: Any
    ) -> Any:
        given.update(dataset)
        raise typer.Exit(7)

    monkeypatch.setattr(sweeps, "submit_file", submit_file)
    (tmp_path / "a.jsonl").touch()
    options = [option for each in settings for option in ("--set", each)]
    command = ["--vary", "seed=1,2", str(tmp_path / "a.jsonl"), *options]
    assert CliRunner().invoke(app, ["sweep", *command]).exit_code == 7
    assert given["validation_split"] == share
