import json
from math import log
from pathlib import Path

import pytest

from app.cli import demo_data
from app.cli.demo import _make_empty, run
from app.errors import InvalidRequest
from app.results.charts import loss_curve


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "data.jsonl"
    demo_data.write(path)
    return path


@pytest.mark.thorough
def test_the_data_is_the_standard_library_s_documentation(data: Path) -> None:
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(lines) > 3000
    lengths = sorted(len(line["prompt"] + line["completion"]) for line in lines)
    assert lengths[len(lengths) // 10] < 100
    assert lengths[-len(lengths) // 50] > 600
    found = [line for line in lines if line["prompt"].startswith("# textwrap\ndef dedent(")]
    assert found[0]["completion"].startswith("Remove any common leading whitespace")


def test_a_folder_with_other_content_is_not_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "data.txt"
    mine.parent.mkdir()
    mine.write_text("x")
    with pytest.raises(InvalidRequest, match="choose a new folder"):
        run(mine.parent, 2)
    with pytest.raises(InvalidRequest, match="choose a new folder"):
        run(mine, 2)
    assert mine.read_text() == "x"


def test_an_earlier_demo_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    _make_empty(folder)
    (folder / "old").touch()
    monkeypatch.chdir(folder)
    _make_empty(Path())
    assert Path.cwd() == folder
    assert [each.name for each in folder.iterdir()] == [".accrue-demo"]


def test_the_entropy_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "zzz", "completion": "aaa"}\n')
    assert demo_data.byte_entropy(path) == pytest.approx(-(0.75 * log(0.75) + 0.25 * log(0.25)))


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    series = [{"step": i, "loss": 5 / i, "loss_ema": 5 / i, "learning_rate": 0.1} for i in range(1, 9)]
    chart = loss_curve(
        {"data": series, "evaluations": [{"step": 2, "loss": 4.0}]},
        tmp_path / "loss.png",
        "title",
        entropy=3.0,
    )
    assert chart.read_bytes().startswith(b"\x89PNG")
