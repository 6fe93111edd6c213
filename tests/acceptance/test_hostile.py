"""Malicious requests: refused with a reason, or harmless; never a 500."""

import contextlib
import json
import os
import pickle
import socket
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.service import TRAINING, Accrue, running
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

pytestmark = pytest.mark.thorough

CONFIG = "/gradient-accumulation/config"
CALCULATE = "/gradient-accumulation/calculate-batch-size"

STRANGE_IDS = [
    "..", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%252e%252e%252f", "..\\..\\windows", "/etc/passwd",
    "ftjob-1;rm", "ftjob-%00", "file-../../accrue.db", "file-1%0d%0aSet-Cookie:x", "%c0%ae%c0%ae", "~root",
    "ftjob-' OR 1=1 --", "A" * 5000, "ft:a:b:c:../../..", "\u202eftjob-1",
]  # fmt: skip
PLACES = [
    TRAINING + "/{}", TRAINING + "/{}/model", TRAINING + "/{}/events", CONFIG + "/{}", "/v1/files/{}",
    "/v1/files/{}/content", "/v1/models/{}", "/v1/fine_tuning/jobs/{}", "/gradient-accumulation/stats/{}",
]  # fmt: skip
STRANGE_MODELS = [
    "..", "../accrue-data", "/etc", "a/../../b", "a/b/c", ".hidden", "a\x00b", "a b", "http://evil/x",
    "file:///etc/passwd", "C:\\models", "-x", "a/" + "b" * 500, "$(touch x)", "{{7*7}}", "%2e%2e",
]  # fmt: skip
STRANGE_NUMBERS = [
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "9" * 400,
    "1" + "0" * 5000,
    "-0.0",
    "1e-400",
    "0x10",
]


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def accrue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accrue]:
    folder = tmp_path_factory.mktemp("accrue")
    (folder / "models").mkdir()
    (folder / "secret").mkdir()
    (folder / "secret" / "config.json").write_text('{"model_type": "gpt2", "secret": "hunter2"}')
    (folder / "models" / "link").symlink_to(folder / "secret")
    with running(folder) as accrue:
        accrue.serve()
        accrue.start("worker")
        yield accrue


def refused(answer: Any) -> None:
    """Checks that a request was refused with a reason that reveals nothing about the machine."""
    assert 400 <= answer.status_code < 500, answer.text
    if answer.content:
        assert answer.json()["error"]["message"]
        assert not any(secret in answer.text for secret in ("root:x:", "hunter2", "Traceback", "sqlalchemy"))


@pytest.mark.parametrize("place", PLACES)
def test_an_id_is_never_a_path(accrue: Accrue, place: str) -> None:
    for strange in STRANGE_IDS:
        for quoted in (strange, strange.replace("/", "%2F")):
            path = place.format(quoted)
            with socket.create_connection(("127.0.0.1", accrue.port), 10) as raw:  # no client mends the path
                raw.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode().replace(
                        b" OR 1=1 ", b"%20OR%201=1%20"
                    )
                )
                answer = b"".join(iter(lambda: raw.recv(65536), b""))
            status = int(answer.split(b" ", 2)[1])
            assert status in (400, 404, 405, 409, 414, 422), (path, answer[:300])
            assert b"root:x:" not in answer
            assert b"SQLite format" not in answer


@pytest.mark.parametrize("name", STRANGE_MODELS)
def test_a_model_s_name_is_never_a_path(accrue: Accrue, name: str) -> None:
    body = {"model_name": name, "dataset_config": {"texts": ["one"]}}
    refused(accrue.http.post(f"{TRAINING}/with-accumulation", json=body))
    refused(accrue.http.post(CALCULATE, json={"model_name": name, "target_effective_batch_size": 8}))


def test_links_out_of_the_models_folder_are_not_followed(accrue: Accrue) -> None:
    body = {"model_name": "link", "dataset_config": {"texts": ["one"]}}
    refused(accrue.http.post(f"{TRAINING}/with-accumulation", json=body))


@pytest.mark.parametrize("number", STRANGE_NUMBERS)
@pytest.mark.parametrize("field", ["target_effective_batch_size", "gradient_clipping", "accumulation_steps"])
def test_non_finite_numbers_are_rejected(accrue: Accrue, field: str, number: str) -> None:
    body = f'{{"{field}": {number}}}'
    answer = accrue.http.post(CONFIG, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (201, 400, 422), answer.text
    if answer.status_code == 201:  # -0.0 and 1e-400 are zero, and no limit is zero
        assert json.loads(number) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"a": "\\ud800"}', b"", b"null", b'"text"',
        b'{"metadata": {' + b",".join(b'"k%d": "v"' % n for n in range(10_000)) + b"}}",
        b'{"__proto__": {"x": 1}}', b'{"target_effective_batch_size": [8]}',
    ],
)  # fmt: skip
def test_invalid_bodies_are_rejected(accrue: Accrue, body: bytes) -> None:
    refused(accrue.http.post(CONFIG, content=body, headers={"Content-Type": "application/json"}))


def archive(kind: str) -> bytes:
    out = BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("../../../evil"), BytesIO())
    elif kind == "zip":
        import zipfile

        with zipfile.ZipFile(out, "w") as zipped:
            zipped.writestr("../../../evil", "x")
    else:
        pickle.dump({"text": "x"}, out)
    return out.getvalue()


NO_TRAINING_FILES = {
    "tar": archive("tar"),
    "zip": archive("zip"),
    "pickle": archive("pickle"),
    "empty": b"",
    "blank": b"\n\n",
    "a line of 10 MB": b'{"text": "' + b"x" * 10_000_000 + b'"}\n',
    "a number": b'{"text": 1}\n',
    "deep": b"[" * 200_000 + b"\n",
    "mixed": b'{"text": "a"}\n{"prompt": "b", "completion": "c"}\n',
    "infinite weight": b'{"text": "a", "weight": 1e400}\n',
    "nulls": b"\x00" * 1000,
}


@pytest.mark.parametrize("content", NO_TRAINING_FILES.values(), ids=NO_TRAINING_FILES)
def test_invalid_training_files_are_rejected(accrue: Accrue, content: bytes) -> None:
    files = {"file": ("../../evil.jsonl", content)}
    refused(accrue.http.post("/v1/files", files=files, data={"purpose": "fine-tune"}))
    assert not list((accrue.data / "files").iterdir())


def test_a_file_s_name_is_a_label(accrue: Accrue) -> None:
    files = {"file": ('../../../"evil\r\nX-Evil: 1.jsonl', b'{"text": "a"}\n')}
    made = accrue.http.post("/v1/files", files=files, data={"purpose": "fine-tune"}).json()
    content = accrue.http.get(f"/v1/files/{made['id']}/content")
    assert "x-evil" not in content.headers
    assert [path.name for path in (accrue.data / "files").iterdir()] == [made["id"]]
    accrue.http.delete(f"/v1/files/{made['id']}")


def test_too_many_headers_are_rejected(accrue: Accrue) -> None:
    with socket.create_connection(("127.0.0.1", accrue.port), 10) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with contextlib.suppress(OSError):  # hangs up on us
            for number in range(20_000):
                raw.sendall(b"X-Flood-%d: %s\r\n" % (number, b"x" * 100))
    assert accrue.answers()


def train_with(accrue: Accrue, name: str) -> Any:
    job_id = accrue.submit(
        model_name=name, dataset_config={"texts": ["one", "two"]}, training_config={"max_steps": 1}
    )
    return accrue.ended(job_id)


def test_code_beside_a_model_is_never_run(accrue: Accrue, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = accrue.data.parent / "models" / "with-code"
    ensure_tiny_gpt2(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
    (folder / "own.py").write_text(f"import os; os.system('touch {canary}')\n")
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": own, "nested": {"auto_map": own}}))
    job = train_with(accrue, "with-code")
    assert job["status"] == "succeeded"  # by transformers' own GPT-2
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    body = {"model_name": "with-code", "dataset_config": {"texts": ["one"]}}
    refused(accrue.http.post(f"{TRAINING}/with-accumulation", json=body))
    assert not canary.exists()


def test_pickled_weights_are_never_loaded(accrue: Accrue, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = accrue.data.parent / "models" / "pickled"
    ensure_tiny_gpt2(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Canary(canary)}, folder / "pytorch_model.bin")
    with pytest.raises(AssertionError, match="but only safetensors are read"):  # before anything is queued
        train_with(accrue, "pickled")
    (folder / "other.safetensors").touch()  # whatever the service thinks of it, the trainer does not load it
    job = train_with(accrue, "pickled")
    assert (job["status"], job["error"]["code"]) == ("failed", "model_not_loaded")
    assert not canary.exists()
