"""Requests for the operator's own metrics."""

from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from tests.harness.requests import JOB, PATH, service


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "own.py").write_text("print(1)")
    return folder


def answered(settings: Settings, folder: Path | None, dataset: dict[str, Any], **training: Any) -> Any:
    with service(settings, metric_programs_dir=folder) as (client, header):
        body = {
            **JOB,
            "dataset_config": {**JOB["dataset_config"], **dataset},
            "training_config": training,
            "dry_run": True,
        }
        return client.post(f"{PATH}/with-accumulation", json=body, headers=header)


def test_metrics_complete_twenty_prompts_by_default(settings: Settings, metrics: Path) -> None:
    held = {"validation_split": 0.5}
    assert answered(settings, metrics, held, metrics=["own"]).json()["training_config"]["completions"] == 20
    own = answered(settings, metrics, held, metrics=["own"], completions=7)
    assert own.json()["training_config"]["completions"] == 7


@pytest.mark.parametrize(
    ("dataset", "training", "why"),
    [
        ({}, {"metrics": ["own"]}, "validation_split"),
        ({"validation_split": 0.5}, {"metrics": ["other"]}, "there are own"),
        ({"validation_split": 0.5}, {"metrics": ["own"], "completions": 0}, "completions is 0"),
        ({"validation_split": 0.5}, {"metrics": ["../own"]}, "no metric"),
        ({"validation_split": 0.5}, {"metrics": ["own"], "compile": True}, "compile"),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused(
    settings: Settings, metrics: Path, dataset: dict[str, Any], training: dict[str, Any], why: str
) -> None:
    answer = answered(settings, metrics, dataset, **training)
    assert answer.status_code == 422
    assert why in answer.json()["detail"]


def test_without_a_folder_there_are_none(settings: Settings) -> None:
    answer = answered(settings, None, {"validation_split": 0.5}, metrics=["own"])
    assert "ACCRUE_METRIC_PROGRAMS_DIR holds none" in answer.json()["detail"]
