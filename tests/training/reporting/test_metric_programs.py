"""The operator's own metrics: programs that score completions."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from app.contract.metric_programs import metric_programs
from app.contract.reports import LogLine
from app.contract.spec import ValidationSpec
from app.results.csv_export import csv_lines
from app.results.series import Evaluation
from tests.harness.runs import create_run, small_data, write_chats
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end
from workers.training.reporting.metric_programs import Completed, NotScored, score

ROWS = [Completed("What is 1?", "It is 1.", "It is 1."), Completed("What is 2?", "It is 2.", "No \u2028.")]
MATCHES = (
    "import json, sys\nlines = [json.loads(line) for line in sys.stdin]\nprint('counting')\n"
    "print(sum(each['completion'] == each['expected'] for each in lines) / len(lines))\n"
)


def program(folder: Path, content: str, name: str = "own.py") -> str:
    path = folder / name
    path.write_text(content)
    return str(path)


def test_a_program_scores_completions(tmp_path: Path) -> None:
    assert score(program(tmp_path, MATCHES), ROWS) == 0.5
    shell = Path(program(tmp_path, "#!/bin/sh\nwc -l\n", "lines"))
    shell.chmod(0o755)
    assert score(str(shell), ROWS) == 2.0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("print('many')", "printed no number"),
        ("", "printed no number"),
        ("print('nan')", "printed nan"),
        ("print(1); raise SystemExit(3)", "status 3"),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", "could not be run"),
    ],
)
def test_a_program_without_a_number_is_named_with_its_reason(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(NotScored, match=why):
        score(program(tmp_path, content), ROWS)


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.training.reporting.metric_programs.SECONDS", 0.5)
    with pytest.raises(NotScored, match="more than"):
        score(program(tmp_path, "import time; time.sleep(60)"), ROWS)


def test_only_programs_with_plain_names_are_metrics(tmp_path: Path) -> None:
    program(tmp_path, "", "own.py")
    program(tmp_path, "", "notes.txt")
    program(tmp_path, "", ".hidden.py")
    program(tmp_path, "", "two words.py")
    Path(program(tmp_path, "", "judge")).chmod(0o755)
    (tmp_path / "folder.py").mkdir()
    assert sorted(metric_programs(tmp_path)) == ["judge", "own"]
    assert metric_programs(None) == metric_programs(tmp_path / "nothing") == {}


@pytest.mark.thorough
def test_a_run_reports_its_metrics(tmp_path: Path) -> None:
    write_chats(tmp_path / "data.jsonl")
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(format="messages", examples=40, validation=share), eval_every=5, completions=4,
        metrics=("own", "missing", "broken"),
    )  # fmt: skip
    run = create_run(tmp_path / "run", spec)
    programs = {"own": program(tmp_path, "import sys; print(len(sys.stdin.readlines()))"),
                "broken": program(tmp_path, "1/0", "broken.py")}  # fmt: skip
    run.write_assignment(run.assignment().model_copy(update={"metrics": programs}))
    run_to_end(run)
    found = [event for event in events_of_kind(run, "metric") if event["data"]["name"] == "own"]
    assert [(each["data"]["step"], each["data"]["value"]) for each in found] == [(0, 4), (5, 4), (10, 4)]
    missing = [event for event in events_of_kind(run, "metric") if event["data"]["name"] == "missing"]
    assert {each["level"] for each in missing} == {"warning"}
    assert "ACCRUE_METRIC_PROGRAMS_DIR" in missing[0]["message"]
    broken = [event for event in events_of_kind(run, "metric") if event["data"]["name"] == "broken"]
    assert all(each["data"]["value"] is None for each in broken)


def test_the_csv_has_a_column_for_each_metric() -> None:
    def line(step: int) -> dict[str, Any]:
        return {**dict.fromkeys(LogLine.model_fields), "step": step}

    evaluated = {
        0: Evaluation(None, None, metrics={"own": 0.1}),
        2: Evaluation(1.5, 0.5, metrics={"own": 0.25}),
    }
    rows = list(csv.DictReader("".join(csv_lines([[line(1), line(2)]], evaluated)).splitlines()))
    assert [row["valid_own"] for row in rows] == ["", "0.25"]
    assert [row["valid_loss"] for row in rows] == ["", "1.5"]
    assert json.loads(json.dumps(rows))
