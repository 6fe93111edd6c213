"""Training data and keys appear in no log, no answer and no metric."""

import json
import secrets
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough

CANARY = f"canary{secrets.token_hex(8)}"
ROOT = "/gradient-accumulation"


def test_training_text_and_keys_are_never_exposed(accrue: Accrue, tmp_path: Path) -> None:
    debugging = {"ACCRUE_LOG_LEVEL": "DEBUG", "ACCRUE_LOG_FORMAT": "json", "ACCRUE_AUDIT_READS": "true"}
    accrue.serve(**debugging)
    accrue.key = accrue.command("keys", "create", "private", "--scope", "admin").stdout.strip()
    accrue.http.headers.update(accrue.header)
    accrue.start("worker", **debugging)
    answers = [refused(accrue), *asked_for_everything(accrue, succeeded(accrue), failed(accrue))]
    accrue.stop()
    written = [tmp_path / "processes.log", *(accrue.data / "runs").rglob("*.jsonl")]
    written += [*(accrue.data / "runs").rglob("*.log"), *(accrue.data / "runs").rglob("*.json")]
    assert any("trainer" in path.read_text(errors="replace") for path in written)
    for told in (*answers, *(path.read_text(errors="replace") for path in written)):
        assert CANARY not in told, told[max(0, told.find(CANARY) - 300) :][:600]
        assert accrue.key not in told, told[:600]
        assert accrue.key.removeprefix("ak_")[:43] not in told


def succeeded(accrue: Accrue) -> str:
    job_id = accrue.submit(
        dataset_config={"texts": [f"a secret: {CANARY} {n}" for n in range(12)], "max_length": 64},
        training_config={"max_steps": 4},
    )
    assert accrue.ended(job_id)["status"] == "succeeded"
    return job_id


def failed(accrue: Accrue) -> str:
    """On data that was tampered with after it was checked."""
    file_id = accrue.upload(json.dumps({"text": f"another secret: {CANARY}"}).encode())
    with (accrue.data / "files" / file_id).open("ab") as file:
        file.write(b'{"no": "' + CANARY.encode() + b'"}\n')
    job_id = accrue.submit(dataset_config={"file_id": file_id}, training_config={"max_steps": 4})
    job = accrue.ended(job_id)
    assert (job["status"], bool(job["error"]["message"])) == ("failed", True)
    return job_id


def refused(accrue: Accrue) -> str:
    """What errors say of data that is wrong."""
    bad = [
        b'{"txt": "' + CANARY.encode() + b'"}\n',
        b'{"text": "' + CANARY.encode(),
        b'{"messages": [{"role": "user", "content": ["' + CANARY.encode() + b'"]}]}\n',
    ]
    told = [
        accrue.http.post("/v1/files", files={"file": ("x.jsonl", each)}, data={"purpose": "fine-tune"})
        for each in bad
    ]
    for texts in ([CANARY, ""], [CANARY, 5], {"text": CANARY}, [[CANARY]]):
        body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"texts": texts}, "max_steps": "x"}
        told.append(accrue.http.post(f"{TRAINING}/with-accumulation", json=body))
    wrong = httpx.Client(base_url=accrue.url, headers={"Authorization": f"Bearer {accrue.key}x"})
    told.append(wrong.get(TRAINING))
    wrong.close()
    assert {answer.status_code for answer in told} <= {400, 401, 422}, [answer.text for answer in told]
    return "\n".join(answer.text for answer in told)


def asked_for_everything(accrue: Accrue, *job_ids: str) -> list[str]:
    """The answers of all GETs about these jobs, except the data itself and the model's weights."""
    document: dict[str, Any] = accrue.get("/openapi.json")
    told = [json.dumps(document)]
    for path, operations in document["paths"].items():
        if "get" not in operations or path.endswith(("/content", "/model")):
            continue
        for job_id in job_ids if "{" in path else job_ids[:1]:
            told.append(accrue.http.get(_filled(path, job_id)).text)
    return told


def _filled(path: str, identifier: str) -> str:
    begin, brace, rest = path.partition("{")
    return begin + identifier + _filled(rest.partition("}")[2], identifier) if brace else path
