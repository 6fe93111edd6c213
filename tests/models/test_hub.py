"""Models of the hub: found with a token and a revision, and pinned to a commit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.errors import Unprocessable
from app.models import base_models
from app.planning.catalogue import TINY_GPT2
from app.settings import Settings
from tests.harness.hub import COMMIT, OLDER_COMMIT, Hub, running_hub, use
from tests.harness.requests import JOB, PATH
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    ensure_tiny_gpt2(tmp_path / "source")
    with running_hub(tmp_path / "source") as hub:
        use(hub, tmp_path, monkeypatch)
        yield hub


@pytest.fixture
def online(settings: Settings) -> Settings:
    return settings.model_copy(update={"offline": False})


def refusal(name: str, settings: Settings) -> str:
    with pytest.raises(Unprocessable) as caught:
        base_models.find_model(name, settings)
    assert caught.value.field == "model_name"
    return caught.value.message


def test_a_model_is_pinned_to_its_commit(hub: Hub, online: Settings) -> None:
    model, _ = base_models.find_model("me/tiny", online)
    assert (model.source, model.revision) == ("hub", COMMIT)
    older, _ = base_models.find_model("me/tiny@v1", online)
    assert (older.name, older.revision) == ("me/tiny@v1", OLDER_COMMIT)
    assert base_models.path_of(older, online) == "me/tiny"
    assert older.below_adapters() == ("me/tiny", OLDER_COMMIT)


def test_a_private_model_needs_a_token(hub: Hub, online: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    assert "it is private and HF_TOKEN is not set" in refusal("me/tiny", online)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refusal("me/tiny", online)
    assert "rejects this machine's token (HF_TOKEN)" in message
    assert "hf_wrong" not in message
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert base_models.find_model("me/tiny", online)[0].revision == COMMIT
    assert hub.downloaded_with == {"Bearer hf_right"}


def test_a_gated_model_s_error_says_what_to_accept_and_where(hub: Hub, online: Settings) -> None:
    hub.is_gated = True
    assert f"is gated: accept its conditions at {hub.url}/me/tiny" in refusal("me/tiny", online)


def test_what_the_hub_does_not_have_is_told_apart(hub: Hub, online: Settings) -> None:
    assert "has no revision v7" in refusal("me/tiny@v7", online)
    assert "the hub has no such model, or it is private" in refusal("me/other", online)
    assert "the hub has no such model" in refusal("you/tiny", online)
    del hub.files["config.json"]
    assert "has no config.json on the hub" in refusal("me/tiny", online)


def test_a_catalogue_s_model_without_weights_is_not_called_unknown(hub: Hub, online: Settings) -> None:
    assert "The weights of the model meta-llama/Llama-3.1-8B are not" in refusal(
        "meta-llama/Llama-3.1-8B", online
    )
    assert "The model me/other is not" in refusal("me/other", online)


@pytest.mark.parametrize("name", ["me/tiny@", "me/tiny@../x", "me/tiny@-v", "@v1"])
def test_a_revision_has_a_plain_form(client: Any, name: str) -> None:
    body = {"model_name": name, "target_effective_batch_size": 8}
    answer = client.post("/gradient-accumulation/calculate-batch-size", json=body)
    assert answer.status_code == 422
    assert "@revision" in answer.text


def test_a_folder_with_weights_in_other_formats_only_is_refused(
    client: TestClient, settings: Settings
) -> None:
    assert settings.models_dir is not None
    folder = settings.models_dir / "old"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_GPT2))
    (folder / "pytorch_model.bin").touch()
    path, body = f"{PATH}/with-accumulation", {**JOB, "model_name": "old", "dry_run": True}
    refused = client.post(path, json=body)
    assert refused.status_code == 422
    assert "has weights in pytorch_model.bin" in refused.json()["error"]["message"]
    file = ("data.jsonl", b'{"text": "a"}\n' * 8)
    uploaded = client.post("/v1/files", files={"file": file}, data={"purpose": "fine-tune"})
    data = {"file_id": uploaded.json()["id"]}
    varied = {**body, "dataset_config": data, "vary": {"learning_rate": [1e-5, 1e-4]}}
    sweep = client.post("/gradient-accumulation/sweeps", json=varied)
    assert "has weights in pytorch_model.bin" in sweep.json()["error"]["message"]
    (folder / "model.safetensors").touch()
    assert client.post(path, json=body).status_code == 200
