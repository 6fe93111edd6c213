"""Datasets of the hub: found by name, read like files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.datasets import content, dataset_folder
from app.datasets.file_types import ReadOptions
from app.errors import Unprocessable
from app.settings import Settings
from tests.harness.hub import Hub, running_hub, use

pytestmark = pytest.mark.sqlite

ROWS = [{"q": f"{number} + 1", "a": str(number + 1)} for number in range(3)]
HOW = ReadOptions({"prompt": "q", "completion": "a"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "source").mkdir()
    with running_hub(tmp_path / "source") as hub:
        use(hub, tmp_path, monkeypatch)
        for name, rows in (("data/train-0.jsonl", ROWS[:2]), ("data/train-1.jsonl", ROWS[2:])):
            hub.files[name] = "\n".join(map(json.dumps, rows)).encode()
        hub.files |= {"data/test-0.jsonl": b"{}", "README.md": b"about", "code.py": b"raise SystemExit"}
        yield hub


@pytest.fixture
def online(settings: Settings) -> Settings:
    settings.make_directories()
    return settings.model_copy(update={"offline": False})


def refusal(name: str, settings: Settings) -> str:
    with pytest.raises(Unprocessable) as caught:
        dataset_folder.find(name, HOW, settings)
    assert caught.value.field == "dataset_config.dataset"
    return caught.value.message


def test_the_training_files_are_downloaded_and_read(hub: Hub, online: Settings) -> None:
    for name in ("me/sums", "me/sums@v1"):
        found = dataset_folder.find(name, HOW, online)
        assert [name for _, name in found.sources] == ["train-0.jsonl", "train-1.jsonl"]
        path = online.files_dir / "file-1"
        stored = content.store_files(found, path, online, field="dataset_config.dataset")
        assert (stored.format, stored.examples) == ("prompt_completion", 3)
        assert json.loads(path.read_text().splitlines()[0]) == {"prompt": "0 + 1", "completion": "1"}
        path.unlink()


def test_a_dataset_that_the_hub_refuses_gets_an_explained_error(
    hub: Hub, online: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no revision v7" in refusal("me/sums@v7", online)
    assert "nor on the hub" in refusal("me/other", online)
    assert "more than 10" in refusal("me/sums", online.model_copy(update={"max_file_bytes": 10}))
    hub.is_gated = True
    assert "is gated: accept its conditions" in refusal("me/sums", online)
    hub.is_gated, hub.token = False, "hf_right"
    assert "a token that may read it" in refusal("me/sums", online)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert len(dataset_folder.find("me/sums", HOW, online).sources) == 2
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached" in refusal("me/elsewhere", online)
    assert "ACCRUE_DATASETS_DIR is not set" in refusal("me/sums", online.model_copy(update={"offline": True}))


def test_a_data_set_with_several_subsets_or_without_data_is_refused(hub: Hub, online: Settings) -> None:
    hub.files["other/train-0.jsonl"] = b"{}"
    assert "in the folders data, other" in refusal("me/sums", online)
    hub.files.clear()
    hub.files["model.bin"] = b""
    assert "has no file that can be read" in refusal("me/sums", online)
