"""Regression tests for what the second attack found."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.reports import Failure
from app.errors import QuotaExceeded, Unprocessable
from app.jobs import lifecycle, queue
from app.jobs.transitions import Fence
from app.models import base_models, hub
from app.planning.architectures import UnknownArchitecture, from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import parse_device
from app.settings import Settings
from app.storage.database import Database
from app.submissions import key_limits
from tests.harness.dripping import slow_server
from tests.harness.requests import JOB, PATH, key_for, service, submit
from tests.harness.specs import make_spec
from tests.harness.submissions import submitted

ROOT = "/gradient-accumulation"
TOO_LONG = Failure(code=lifecycle.TIMEOUT, message="too long", permanent=True)


@pytest.mark.parametrize("phrase", ["A" + "1" * 60_000 + "x", "A" + "-" * 60_000 + "x", "9" * 310 + "GB"])
def test_long_device_names_are_rejected_quickly(client: TestClient, phrase: str) -> None:
    with pytest.raises(ValueError, match="longer than 60"):
        parse_device(phrase, 0)
    assert client.get(f"{ROOT}/performance/recommendations", params={"gpus": phrase}).status_code == 422


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": "999999999999"},
        {"num_hidden_layers": 40_000_000},
        {"num_hidden_layers": "4000000"},
        {"num_hidden_layers": 900, "num_experts": 10**9},
    ],
)
def test_mixture_configs_with_too_many_layers_are_rejected_quickly(config: dict[str, Any]) -> None:
    whole = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 1000, "max_position_embeddings": 512, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_hidden_layers": 2,
    }  # fmt: skip
    assert from_config(whole).layers == 2
    began = time.monotonic()
    with pytest.raises(UnknownArchitecture):
        from_config({**whole, **config})
    assert time.monotonic() - began < 5  # it took hours


@pytest.mark.parametrize("user", ["alice", "José", "日本", "😀", 'a"b', 7])
def test_jobs_can_be_filtered_by_any_user_id(client: TestClient, user: str | int) -> None:
    job_id = submit(client, user_id=user)["id"]
    submit(client, user_id="somebody else")
    query = {"user_id": str(user)}
    assert [job["id"] for job in client.get(PATH, params=query).json()["data"]] == [job_id]
    assert client.get(f"{ROOT}/stats", params=query).json()["by_user"] == {str(user): 1}


def timed_out(database: Database, count: int) -> list[str]:
    """Jobs that exceeded their timeout, and so no longer count as waiting."""
    ids = []
    for _ in range(count):
        job_id = submitted(
            database, make_spec(timeout_seconds=1.0), config={"use_gradient_accumulation": True}
        )
        with database.writing() as session:
            assert queue.claim(session, "worker-1", 60.0) == Fence(job_id, 1, "worker-1")
            queue.fail(session, Fence(job_id, 1, "worker-1"), TOO_LONG)
        ids.append(job_id)
    return ids


@pytest.mark.parametrize("action", ["start", "resume"])
def test_the_quota_applies_to_every_action_that_requeues_a_job(settings: Settings, action: str) -> None:
    with service(settings, max_queued_jobs=2) as (client, _):
        database: Database = client.app.state.database  # type: ignore[attr-defined]
        admin = key_for(database, "read", "write", "admin")
        answers = [
            client.post(f"{PATH}/{job_id}/{action}", headers=admin).status_code
            for job_id in timed_out(database, 4)
        ]
        assert answers == [200, 200, 429, 429]


def test_the_quota_holds_under_concurrent_submissions(database: Database, settings: Settings) -> None:
    few = settings.model_copy(update={"max_queued_jobs": 3})

    def resume(job_id: str) -> bool:
        try:
            with database.writing() as session:
                key_limits.resume_within_limits(session, job_id, few)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(resume, timed_out(database, 12))) == 3


def test_concurrent_changes_of_a_configuration_are_all_applied(client: TestClient) -> None:
    config = client.post(f"{ROOT}/config", json={}).json()["config_id"]
    changes: list[dict[str, Any]] = [
        {"micro_batch_size": 2}, {"target_effective_batch_size": 64}, {"max_memory_usage": 0.5},
        {"gradient_clipping": 2.0}, {"noise_scale_every": 7},
    ]  # fmt: skip
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda own: client.patch(f"{ROOT}/config/{config}", json=own), changes))
    assert [answer.status_code for answer in answers] == [200] * 5
    stored = client.get(f"{ROOT}/config/{config}").json()["config"]
    for own in changes:
        assert own.items() <= stored.items()


def test_a_file_used_by_another_key_s_job_cannot_be_deleted(client: TestClient) -> None:
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    alice, admin = key_for(database), key_for(database, "read", "write", "admin")
    content = {"file": ("held.jsonl", b'{"text": "one"}\n{"text": "two"}\n')}
    file_id = client.post("/v1/files", files=content, data={"purpose": "fine-tune"}, headers=alice).json()[
        "id"
    ]
    data = {**JOB["dataset_config"], "validation_file_id": file_id}
    job = client.post(f"{PATH}/with-accumulation", json={**JOB, "dataset_config": data}, headers=admin)
    assert job.status_code == 202, job.text
    refused = client.delete(f"/v1/files/{file_id}", headers=alice)
    assert refused.status_code in (400, 409)
    assert "another key" in refused.text
    assert job.json()["id"] not in refused.text
    mine = client.post(f"{PATH}/with-accumulation", json=JOB, headers=alice).json()["id"]
    client.post(f"{PATH}/{mine}/cancel", headers=alice)
    again = client.post(f"{PATH}/{mine}/retry", headers=admin)
    assert again.status_code == 202, again.text
    assert client.delete(f"{PATH}/{mine}", headers=alice).status_code == 204  # its texts are the other's, too
    assert client.get(f"{PATH}/{again.json()['id']}", headers=admin).status_code == 200


@pytest.mark.parametrize("name", ["a--b", "a..b", "foo.git", "a.", "a-", "a/b--c", "models--x", "x" * 97])
def test_names_unknown_to_the_hub_are_rejected(settings: Settings, name: str) -> None:
    online = settings.model_copy(update={"offline": False})
    with pytest.raises(Unprocessable, match="not a valid name on the hub"):
        base_models.find_for_planning(name, online)


def test_a_slow_hub_does_not_delay_other_requests(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 1.0)
    with slow_server() as address:
        monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda name, file, **_: f"{address}/{name}/{file}")
        began = time.monotonic()
        with pytest.raises(Unprocessable, match="too slowly"):
            base_models.find_for_planning("some/model", settings.model_copy(update={"offline": False}))
    assert time.monotonic() - began < 20  # the drip takes a hundred seconds


def test_an_absurdly_large_batch_is_rejected(client: TestClient) -> None:
    body = json.dumps({**JOB, "base_batch_size": 7}).replace("7}", f"{10**400}}}")
    for path in (f"{PATH}/with-accumulation", f"{ROOT}/config"):
        answer = client.post(
            path, content=body if path.startswith(PATH) else '{"base_batch_size": 1%s}' % ("0" * 400)
        )
        assert answer.status_code == 422, answer.text


def test_unusual_entries_in_the_models_folder_are_ignored(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    own = settings.model_copy(update={"models_dir": folder})
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "config.json").write_text(json.dumps(TINY_GPT2))
    (folder / "self").symlink_to(".")
    (folder / "circle").symlink_to("circle")
    (folder / "folder" / "config.json").mkdir(parents=True)
    (folder / "accrue" / "tiny-gpt2").mkdir(parents=True)
    (folder / "accrue" / "tiny-gpt2" / "config.json").write_text(json.dumps(TINY_GPT2))
    assert base_models.local_names(own) == ["accrue/tiny-gpt2", "mine"]
    with pytest.raises(Unprocessable):
        base_models.find_for_planning("circle", own)
    (folder / "mine" / "\udcff.safetensors").write_bytes(b"0")
    assert fingerprint_of_files(folder / "mine")
