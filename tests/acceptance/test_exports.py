"""Exports with real processes: the command, the routes, crashes, and an upload to a hub."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.postgresql import Server
from tests.harness.receiving_hub import receiving_hub
from tests.harness.runs import until, write_chats
from tests.harness.service import TRAINING, Accrue, running

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Iterator[Accrue]:
    """A service with a worker."""
    url = server.new_database() if server is not None else None
    with running(tmp_path_factory.mktemp("accrue"), url) as accrue:
        accrue.serve()
        accrue.start("worker")
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
        yield accrue
    if server is not None and url is not None:
        server.drop(url)


@pytest.fixture(scope="module")
def adapted(working: Accrue, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that has trained adapters."""
    file = working.upload(write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl").read_bytes())
    job = working.submit(
        dataset_config={"file_id": file, "max_length": 64, "validation_split": 0.2},
        training_config={"max_steps": 20, "learning_rate": 1e-2, "method": "lora"},
    )
    assert working.ended(job)["status"] == "succeeded"
    return job


def exported(accrue: Accrue, job: str, **body: Any) -> Any:
    """Requests an export, and waits for its end."""
    made = accrue.post(f"{TRAINING}/{job}/exports", body)
    path = f"{TRAINING}/{job}/exports/{made['id']}"
    until(lambda: accrue.get(path)["status"] in ("succeeded", "failed"), 90)
    return accrue.get(path)


def test_the_command_downloads_a_model_that_agrees(working: Accrue, adapted: str, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    done = working.command("export", adapted, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    assert "compared with the trained model: the same in" in done.stdout
    assert "held-out samples" in done.stdout
    assert f"vllm serve {folder}" in done.stdout
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "Modelfile"} <= {
        each.name for each in folder.iterdir()
    }
    assert working.get(f"{TRAINING}/{adapted}/exports")["data"] == [], "the service keeps no second copy"
    again = working.command("export", adapted, "-o", str(folder))
    assert again.returncode == 1
    assert "already exists" in again.stderr


def test_an_export_over_http(working: Accrue, adapted: str) -> None:
    made = exported(working, adapted, format="adapter")
    assert (made["status"], made["error"], made["type"]) == ("succeeded", None, None)
    assert made["verification"]["agreement"] == 1.0
    assert made["verification"]["samples"] == 8
    assert "--enable-lora" in made["commands"]["vllm"]
    tar = working.http.get(made["download"])
    assert int(tar.headers["Content-Length"]) == len(tar.content) > made["bytes"]
    folder = working.data / "runs" / adapted / "exports" / made["id"]
    assert folder.is_dir()
    path = f"{TRAINING}/{adapted}/exports/{made['id']}"
    assert working.http.delete(path).json() == {"id": made["id"], "deleted": True}
    assert working.http.get(path).status_code == 404
    assert not folder.exists()


def test_what_cannot_be_exported_is_refused(working: Accrue, adapted: str) -> None:
    path = f"{TRAINING}/{adapted}/exports"
    for body, why in (
        ({"format": "merged", "type": "q8_0"}, "GGUF"),
        ({"format": "adapter", "type": "bf16"}, "leave type out"),
        ({"format": "onnx"}, "format"),
    ):
        answer = working.http.post(path, json=body)
        assert answer.status_code == 422
        assert why in answer.json()["detail"]
    assert working.http.post(f"{TRAINING}/ftjob-none/exports", json={}).status_code == 404
    failed = exported(working, adapted, format="gguf")
    assert failed["status"] == "failed"
    assert "ACCRUE_GGUF_CONVERTER" in failed["error"]
    assert failed["download"] is None
    assert working.http.get(f"{path}/{failed['id']}/files").status_code == 409
    command = working.command("export", adapted, "--format", "gguf")
    assert command.returncode == 1
    assert "ACCRUE_GGUF_CONVERTER" in command.stderr


def _exporters(accrue: Accrue) -> list[int]:
    """The export processes of this service's worker."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"workers.exports" in command and str(accrue.data).encode() in environment:
            found.append(int(folder.name))
    return found


def test_after_a_kill_the_export_is_made_again(working: Accrue, adapted: str) -> None:
    made = working.post(f"{TRAINING}/{adapted}/exports", {"format": "merged"})
    path = f"{TRAINING}/{adapted}/exports/{made['id']}"
    until(lambda: working.get(path)["status"] == "running" and _exporters(working))
    for process in _exporters(working):
        os.kill(process, signal.SIGKILL)
    until(lambda: working.get(path)["status"] == "succeeded", 90)


def test_a_deleted_export_leaves_nothing(working: Accrue, adapted: str) -> None:
    made = working.post(f"{TRAINING}/{adapted}/exports", {"format": "merged"})
    path = f"{TRAINING}/{adapted}/exports/{made['id']}"
    until(lambda: working.get(path)["status"] == "running")
    working.http.delete(path)
    folder = working.data / "runs" / adapted / "exports" / made["id"]
    until(lambda: not _exporters(working), 60)
    time.sleep(0.2)
    assert not folder.exists()


def test_an_export_is_pushed_to_a_hub(working: Accrue, adapted: str, tmp_path: Path) -> None:
    with receiving_hub("hf_secret") as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
        working.env.update(variables)
        try:
            done = working.command(
                "export",
                adapted,
                "--output",
                str(tmp_path / "own"),
                "--format",
                "adapter",
                "--push",
                "me/tuned",
                "--json",
            )
        finally:
            for name in variables:
                del working.env[name]
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["pushed_to"] == f"{hub.url}/me/tuned"
        assert hub.repositories["me/tuned"]["visibility"] == "private"
        weights = tmp_path / "own" / "adapter_model.safetensors"
        assert hub.files["adapter_model.safetensors"] == weights.read_bytes()


def test_a_push_that_fails_keeps_the_files(working: Accrue, adapted: str, tmp_path: Path) -> None:
    with receiving_hub("hf_secret") as hub:
        working.env.update({"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_wrong", "HF_HUB_OFFLINE": "0"})
        try:
            done: subprocess.CompletedProcess[str] = working.command(
                "export", adapted, "-o", str(tmp_path / "own"), "--push", "me/tuned"
            )
        finally:
            for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"):
                del working.env[name]
    assert done.returncode == 1
    assert "were not pushed to me/tuned" in done.stderr
    assert (tmp_path / "own" / "model.safetensors").exists()
