"""Regression tests for what the third and the fourth attack found."""

import asyncio
import json
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert, select, update
from starlette.requests import ClientDisconnect

from app.contract.data_formats import BadLine, parse_line
from app.contract.regular_files import NotRegular, create_regular, open_regular, read_regular
from app.contract.spec import ValidationSpec
from app.datasets import file_routes, files, previews
from app.errors import Conflict, InvalidRequest, NotFound, TooManyRequests
from app.jobs import lifecycle
from app.logs import _printable
from app.main import create_app
from app.maintenance.backup import restore, take
from app.models import hub
from app.results import run_files
from app.results.routes import _log_lines
from app.results.series import PAGE
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import File, Job, PreviewRequest, StepMetric
from app.web.downloads import MAX_PER_KEY, ClosingStream, Downloads
from tests.harness.log_lines import line
from tests.harness.specs import make_spec
from tests.harness.submissions import submission, submitted
from workers import ingest
from workers.run_directory import RunDirectory

NATIVE = "/gradient-accumulation"


def stored(file_id: str, **fields: Any) -> File:
    """The row of an uploaded file."""
    return File(id=file_id, created_at=1.0, filename="a", purpose="fine-tune", bytes=1, sha256="0",
                format="text", examples=1, inline=False, **fields)  # fmt: skip


def quickly(work: Any, seconds: float = 3.0) -> Any:
    """Checks the time of some work: the limit is far above its time now, and far below that of the attack."""
    began = time.monotonic()
    done = work()
    assert time.monotonic() - began < seconds
    return done


def test_long_field_names_are_rejected_quickly_and_truncated(client: TestClient) -> None:
    for name in ("[" * 40_000 + "\nx", "-" * 40_000, "a" * 200_000):
        body = json.dumps({name: 1, "model_name": "gpt2"})
        answer = quickly(lambda body=body: client.post(f"{NATIVE}/calculate-batch-size", content=body))
        assert answer.status_code == 422
        assert len(answer.content) < 5000


@pytest.mark.parametrize("charset", ["idna", "punycode", "utf-7", '"idna"'])
def test_a_form_cannot_choose_its_charset(client: TestClient, charset: str) -> None:
    body = (
        b"--x\r\nContent-Disposition: form-data; name=purpose\r\n\r\nxn--" + b"a" * 500_000 + b"\r\n--x--\r\n"
    )
    kind = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
    answer = quickly(lambda: client.post("/v1/files", content=body, headers=kind))
    assert answer.status_code == 415
    plain = {"Content-Type": "multipart/form-data; boundary=x; charset=UTF-8"}
    assert client.post("/v1/files", content=b"--x--\r\n", headers=plain).status_code == 400


def test_the_error_of_a_broken_form_does_not_mention_json(client: TestClient) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = client.post("/v1/files", content=b"no form", headers=kind)
    assert "JSON" not in answer.text


def test_routes_without_samples_limit_the_body_strictly(client: TestClient) -> None:
    many = json.dumps({"model_name": "gpt2", "gpus": [[]] * 1_000_000})
    answer = quickly(lambda: client.post(f"{NATIVE}/calculate-batch-size", content=many))
    assert answer.status_code == 413


def test_bodies_with_millions_of_values_are_rejected(client: TestClient) -> None:
    many = json.dumps({"model_name": "gpt2", "dataset_config": {"texts": [[[[]]]] * 400_000}})
    answer = quickly(lambda: client.post(f"{NATIVE}/training/with-accumulation", content=many))
    assert answer.status_code == 413
    assert "POST /v1/files" in answer.json()["detail"]


def test_unread_logs_hold_no_connection(database: Database) -> None:
    job_id = submitted(database, make_spec())
    rows = [{**vars(line(step)), "job_id": job_id} for step in range(1, 2 * PAGE + 2)]
    with database.writing() as session:
        session.execute(insert(StepMetric), rows)
    streams = [_log_lines(database, job_id, 0) for _ in range(40)]
    begun = [next(stream) for stream in streams]
    assert all(page.count("\n") == PAGE for page in begun)
    with database.reading() as session:
        assert quickly(lambda: session.scalar(select(Job.id))) == job_id
    assert sum(page.count("\n") for page in streams[0]) == PAGE + 1


def test_only_regular_files_of_a_run_directory_are_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("everybody's jobs")
    run = tmp_path / "runs" / "job"
    (run / "profile").mkdir(parents=True)
    (run / "profile" / "trace.json").symlink_to(secret)
    os.mkfifo(run / "pipe")
    (run / "linked").symlink_to(tmp_path)
    for parts in (("profile", "trace.json"), ("pipe",), ("linked", "secret"), ("profile",)):
        with pytest.raises(NotRegular):
            quickly(lambda parts=parts: open_regular(tmp_path / "runs", "job", *parts))
    assert read_regular(tmp_path / "runs", "job", "missing") is None
    (run / ".spec.json.partial").symlink_to(secret)
    with create_regular(run / ".spec.json.partial") as file:
        file.write(b"{}")
    assert secret.read_text() == "everybody's jobs"


def test_links_and_pipes_in_a_run_folder_are_not_handed_out(
    client: TestClient, settings: Settings, database: Database, tmp_path: Path
) -> None:
    job_id = submitted(database, make_spec())
    secret = tmp_path / "secret"
    secret.write_text('{"data": []}')
    run = settings.runs_dir / job_id
    for folder in ("profile", "model"):
        (run / folder).mkdir(parents=True)
    (run / "profile" / "operators.json").write_text('{"data": []}')
    (run / "profile" / "trace.json").symlink_to(secret)
    (run / "model" / "model.safetensors").symlink_to(secret)
    (run / "model" / "config.json").write_text("{}")
    os.mkfifo(run / "completions.json")
    path = f"{NATIVE}/training/{job_id}"
    assert client.get(f"{path}/profile").json()["files"] == []
    assert client.get(f"{path}/profile/trace.json").status_code == 404
    assert quickly(lambda: client.get(f"{path}/completions")).json()["data"] == []
    opened = run_files.model_files(settings, job_id, ["model.safetensors", "config.json"])
    assert opened is not None
    assert list(opened) == ["config.json"]
    for file in opened.values():
        file.close()
    (run / "profile" / "operators.json").write_text("no JSON")
    assert client.get(f"{path}/profile").status_code == 404
    directory = RunDirectory(run)
    (run / "outcome.json").symlink_to(secret)
    assert directory.outcome() is None


def test_a_validation_file_is_kept_once_a_job_names_it(settings: Settings, database: Database) -> None:
    with database.writing() as session:
        session.add(stored("file-2"))
    with database.writing() as session:
        files.hold(session, "file-2", "validation_file_id")
    with database.writing() as session:
        files.remove(session, "file-2")
    with database.writing() as session, pytest.raises(NotFound, match="has been deleted"):
        files.hold(session, "file-2", "validation_file_id")


@pytest.mark.postgresql
def test_deleting_a_file_waits_for_a_job_that_names_it(database: Database) -> None:
    submitted(database)
    with database.writing() as session:
        session.add(stored("file-9"))
    ended: list[str] = []

    def delete() -> None:
        try:
            with database.writing() as session:
                files.remove(session, "file-9")
        except Conflict as error:
            ended.append(error.message)

    other = threading.Thread(target=delete)
    spec = make_spec()
    validation = ValidationSpec(file_id="file-9", sha256="0", format="text", share=None)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"validation": validation})})
    with database.writing() as session:
        files.hold(session, "file-9", "validation_file_id")
        other.start()
        job_id = lifecycle.submit(session, submission(spec)).id
        other.join(0.5)
        assert other.is_alive()
    other.join(10)
    assert job_id in ended[0]


def test_owners_take_turns_at_previews(database: Database) -> None:
    with database.writing() as session:
        for owner in ("a", "b"):
            session.add(stored(f"file-{owner}", owner=owner))
        session.flush()
        for number, owner in enumerate("aaab"):
            session.add(
                PreviewRequest(id=f"preview-{number}", created_at=1.0, file_id=f"file-{owner}", order={})
            )
    served: dict[str | None, float] = {}
    order = []
    for _ in range(4):
        with database.writing() as session:
            claimed = previews.claim(session, served)
            assert claimed is not None
            order.append(claimed.file_id[-1])
    assert order == ["a", "b", "a", "a"]


def test_hub_lookups_do_not_use_up_the_threads(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(hub, "_look_ups", Counter({None: 2, "other keys": 14}))
    try:
        with TestClient(create_app(settings.model_copy(update={"offline": False}))) as client:
            client.headers["Host"] = "127.0.0.1"
            body = {"model_name": "someone/some-model"}
            answer = quickly(lambda: client.post(f"{NATIVE}/calculate-batch-size", json=body))
            assert answer.status_code == 429
    finally:
        silent.close()


@pytest.mark.sqlite
def test_a_backup_with_strange_names_or_links_is_refused(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    with database.writing() as session:
        session.add(stored("../planted"))
    (settings.data_dir / "planted").write_text("stays")
    take(settings, tmp_path / "strange", runs=False)
    fresh = settings.model_copy(update={"data_dir": tmp_path / "fresh", "database_url": None})
    with pytest.raises(InvalidRequest, match="the service never creates"):
        restore(fresh, tmp_path / "strange")
    assert (settings.data_dir / "planted").read_text() == "stays"
    with database.writing() as session:
        session.delete(session.get_one(File, "../planted"))
    take(settings, tmp_path / "linked", runs=False)
    (tmp_path / "linked" / "files" / "file-1").symlink_to("/etc/hostname")
    with pytest.raises(InvalidRequest, match="a symbolic link"):
        restore(fresh, tmp_path / "linked")


def test_a_file_whose_content_is_gone_is_not_found(
    client: TestClient, settings: Settings, database: Database
) -> None:
    uploaded = client.post(
        "/v1/files", files={"file": ("a.jsonl", b'{"text": "a"}\n')}, data={"purpose": "fine-tune"}
    ).json()
    (settings.files_dir / uploaded["id"]).unlink()
    assert client.get(f"/v1/files/{uploaded['id']}/content").status_code == 404


def test_control_characters_in_log_lines_are_escaped() -> None:
    shown = _printable(None, "info", {"path": "/\x1b]0;pwned\x07", "status": 404})
    assert shown == {"path": "/\\x1b]0;pwned\\x07", "status": 404}


def test_a_line_of_very_many_values_is_refused_at_once() -> None:
    for item in ("{}", "0", '{"role": "user", "content": "a"}', "[[[[]]]]"):
        many = '{"messages": [' + ",".join([item] * 150_000) + "]}"
        with pytest.raises(BadLine):
            quickly(lambda many=many: parse_line(many))
        few = '{"messages": [' + ",".join([item] * 40_000) + "]}"
        with pytest.raises(BadLine):
            quickly(lambda few=few: parse_line(few))


def test_result_file_sizes_are_computed_without_holding_a_connection(
    client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submitted(database, make_spec())
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(status="succeeded"))
    pool = client.app.state.database.engine.pool  # type: ignore[attr-defined]
    client.get("/v1/files?purpose=fine-tune-results")
    held, counted = pool.checkedout(), []

    def bytes_of(database: Database, training_id: str) -> int:
        counted.append(pool.checkedout())
        return 7

    monkeypatch.setattr(file_routes, "csv_bytes", bytes_of)
    file_id = f"file-metrics-{job_id.removeprefix('ftjob-')}"
    assert client.get(f"/v1/files/{file_id}").json()["bytes"] == 7
    listed = client.get("/v1/files?purpose=fine-tune-results").json()
    assert [file["bytes"] for file in listed["data"]] == [7]
    assert counted == [held, held]
    assert client.get(f"/v1/files/{file_id}/content").text.startswith("attempt,")


def test_a_stream_s_files_are_closed_when_the_client_has_gone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 2**22)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "asgi": {"spec_version": "2.4"}}

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    for sent in (0, 1, 2):  # before the answer starts, before its first part, within it
        file, sends = (tmp_path / "a").open("rb"), []

        async def send(message: Any, sends: list[Any] = sends, sent: int = sent) -> None:
            if len(sends) == sent:
                raise OSError("gone")
            sends.append(message)

        stream = ClosingStream(run_files.blocks_of(file), file.close)
        with pytest.raises((OSError, ClientDisconnect)):
            asyncio.run(stream(scope, receive, send))
        assert file.closed


def test_an_endless_log_line_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**30)  # sparse
    with pytest.raises(ValueError, match="longer than"):
        quickly(lambda: ingest._new_lines(tmp_path / "metrics.jsonl", 0))


def test_concurrent_downloads_per_key_are_limited() -> None:
    streams, closed = Downloads(), []
    for _ in range(MAX_PER_KEY):
        streams.stream("alice", iter(["x"]))
    with pytest.raises(TooManyRequests, match="downloads"):
        streams.stream("alice", iter(["x"]), lambda: closed.append("at once"))
    assert closed == ["at once"]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    one = streams.stream("bob", iter(["x"]))
    asyncio.run(one({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    assert b"".join(message.get("body", b"") for message in sent) == b"x"
    assert "bob" not in streams._limit._open
