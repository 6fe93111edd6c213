"""Regression tests for what the first attack found."""

import asyncio
import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from app.contract.data_formats import BadLine, parse_line
from app.datasets import content, files
from app.errors import ReplacedDatabase
from app.jobs import lifecycle
from app.jobs.events import record_event_without_webhook
from app.main import create_app
from app.maintenance.data_folder import clean
from app.maintenance.retention import delete_expired
from app.planning.architectures import UnknownArchitecture, from_config
from app.planning.catalogue import TINY_GPT2
from app.security.audit import MAX_UNAUTHENTICATED_PER_MINUTE, AuditLog, AuditRecord
from app.settings import Settings
from app.storage import unsettled_files
from app.storage.database import Database
from app.storage.ids import new_id
from app.storage.tables import AuditEntry, File, Job, JobEvent, Key
from app.storage.waits import MAX_PER_KEY, WaitLimiter
from app.web.event_stream import EventStream
from tests.harness.requests import JOB, PATH, key_for, service, submit
from tests.harness.runs import until
from tests.harness.submissions import submitted

CALCULATE = "/gradient-accumulation/calculate-batch-size"
SUBMIT = f"{PATH}/with-accumulation"


def test_the_body_limit_applies_despite_a_multipart_content_type(settings: Settings) -> None:
    with service(settings, max_body_bytes=4096) as (client, mine):
        body = b"[" + b"[]," * 4000 + b"[]]"
        for path in (CALCULATE, SUBMIT):
            headers = {**mine, "content-type": "multipart/form-data; boundary=x"}
            assert client.post(path, content=body, headers=headers).status_code == 413


def test_who_has_no_key_is_refused_before_the_body_is_read(settings: Settings) -> None:
    read = 0

    def body() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"[" * 10_000

    with service(settings) as (client, _):
        assert client.post(CALCULATE, content=body()).status_code == 401
        answer = client.post(CALCULATE, content=b"{" * 10_000)
        assert answer.status_code == 401  # and not the 422 of a body that is no JSON


@pytest.mark.parametrize("bad", ["a\x00b", "a\ud800b"])
@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("metadata.k", lambda bad: {"metadata": {"k": bad}}),
        ("user_id", lambda bad: {"user_id": bad}),
        ("dataset_config.texts.1", lambda bad: {"dataset_config": {"texts": ["fine", bad]}}),
        ("training_config.freeze.0", lambda bad: {"training_config": {"freeze": [bad]}}),
        ("config_id", lambda bad: {"config_id": bad}),
    ],
)
def test_unstorable_text_is_rejected_with_the_field(
    client: TestClient, bad: str, field: str, place: Any
) -> None:
    answer = client.post(
        SUBMIT,
        content=json.dumps({**JOB, **place(bad)}).encode(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 422, answer.text
    assert field in [each["field"] for each in answer.json()["errors"]], answer.text


def test_nul_in_the_url_is_rejected_and_later_requests_are_audited(
    client: TestClient, settings: Settings
) -> None:
    assert client.post("/x%00y").status_code == 400
    assert client.get("/gradient-accumulation/training?user_id=a%00").status_code == 400
    made = client.post("/gradient-accumulation/config", json={"accumulation_steps": 2}).json()["config_id"]
    assert client.delete(f"/gradient-accumulation/config/{made}").status_code == 204
    until(lambda: len(client.get("/gradient-accumulation/audit").json()["data"]) >= 3)


def test_one_unstorable_audit_entry_does_not_lose_others(database: Database) -> None:
    audit = AuditLog(database, 365.0)
    deeds = [AuditRecord(1.0, None, "POST", path, 200, "::1", "req") for path in ("/a", "/b")]
    rows = [{"id": new_id("audit"), **vars(deed)} for deed in deeds]
    rows[0]["status"] = None  # which the table does not take
    audit._store(rows)
    with database.reading() as session:
        assert session.scalars(select(AuditEntry.path)).all() == ["/b"]


def test_unauthenticated_requests_cannot_fill_the_audit_log(settings: Settings) -> None:
    with service(settings) as (client, _):
        for _ in range(MAX_UNAUTHENTICATED_PER_MINUTE + 50):
            client.post(SUBMIT, json={})
        client.get(PATH)  # refused, too: and kept among them
    database = Database(
        settings.resolved_database_url
    )  # the service has ended, and has written all that it keeps
    with database.reading() as session:
        kept = session.scalar(select(func.count()).select_from(AuditEntry)) or 0
    database.close()
    assert (
        MAX_UNAUTHENTICATED_PER_MINUTE <= kept <= 2 * MAX_UNAUTHENTICATED_PER_MINUTE
    )  # the minute may have turned meanwhile


def test_unauthorised_reads_are_audited(settings: Settings) -> None:
    with service(settings) as (client, _):
        assert client.get(PATH).status_code == 401
        database: Database = client.app.state.database  # type: ignore[attr-defined]

        def noted() -> bool:
            with database.reading() as session:
                return session.scalar(select(AuditEntry.status).where(AuditEntry.method == "GET")) == 401

        until(noted)


@pytest.mark.parametrize(
    "body",
    [
        {**JOB, "dataset_config": {"texts": [1] * 50_000}},
        {**JOB, **{f"field_{n}": 1 for n in range(400)}},
        {**JOB, **{f"field_{n}": 1 for n in range(5_000)}},
        {**JOB, "gpu_ids": ["x"] * 5_000},
        {**JOB, "training_config": {"freeze": [1] * 5_000}},
    ],
    ids=["texts", "fields", "more fields", "gpu_ids", "freeze"],
)
def test_many_errors_get_a_short_response_quickly(client: TestClient, body: dict[str, Any]) -> None:
    began = time.process_time()
    answer = client.post(SUBMIT, json=body)
    assert answer.status_code == 422
    assert len(answer.content) < 20_000
    assert len(answer.json()["errors"]) <= 20
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 10**12}, {"n_embd": 10**30}, {"vocab_size": float("inf")}, {"n_head": -1},
        {"n_layer": 0}, {"n_positions": 10**40}, {"n_layer": float("nan")}, {"n_inner": list(range(20_000))},
    ],
    ids=str,
)  # fmt: skip
def test_implausible_model_sizes_are_rejected_quickly(changes: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(UnknownArchitecture):
        from_config({**TINY_GPT2, **changes})
    assert time.process_time() - began < 1


def test_a_config_of_a_gigabyte_is_not_read(client: TestClient, settings: Settings) -> None:
    folder = Path(settings.models_dir or "") / "huge"
    folder.mkdir(parents=True)
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**30)
    answer = client.post(CALCULATE, json={"model_name": "huge"})
    assert answer.status_code == 422
    assert "larger than" in answer.json()["detail"]


def test_a_bad_folder_does_not_hide_the_other_models(client: TestClient, settings: Settings) -> None:
    folder = Path(settings.models_dir or "")
    for name, text in {"deep": "[" * 100_000, "none": "{}", "b\udcff": "{}", "a b": "{}"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(text)
    (folder / "dir" / "config.json").mkdir(parents=True)
    assert "accrue/tiny-gpt2" in client.get("/gradient-accumulation/models").text
    assert client.get("/v1/models").status_code == 200


def test_waiting_requests_per_key_are_limited() -> None:
    from contextlib import ExitStack

    from app.errors import TooManyRequests

    waits = WaitLimiter()
    with ExitStack() as stack:
        for _ in range(MAX_PER_KEY):
            stack.enter_context(waits.place("key-1"))
        assert not waits.has_place("key-1")
        assert waits.has_place("key-2")
        with pytest.raises(TooManyRequests):
            stack.enter_context(waits.place("key-1"))
    assert waits.has_place("key-1")


def test_event_streams_per_key_are_limited(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.errors import TooManyRequests
    from app.web import event_stream

    monkeypatch.setattr(event_stream, "MAX_STREAMS_PER_KEY", 3)
    stream = EventStream(database)
    for _ in range(3):
        stream.join("ftjob-1", key_id="key-1")
    stream.join("ftjob-1", key_id="key-2")
    with pytest.raises(TooManyRequests):
        stream.join("ftjob-1", key_id="key-1")


def test_a_retry_counts_as_a_job(settings: Settings) -> None:
    with service(settings, max_queued_jobs=1) as (client, mine):
        job = client.post(SUBMIT, json=JOB, headers=mine).json()["id"]
        assert client.post(f"{PATH}/{job}/cancel", headers=mine).status_code == 200
        assert client.post(f"{PATH}/{job}/retry", headers=mine).status_code == 202
        assert client.post(f"{PATH}/{job}/retry", headers=mine).status_code == 429


def test_profiles_require_the_admin_scope(settings: Settings) -> None:
    with service(settings) as (client, mine):
        profiles = "/gradient-accumulation/profiles"
        assert client.get(profiles, headers=mine).status_code == 403
        assert client.delete(f"{profiles}/profile-1", headers=mine).status_code == 403
        admin = key_for(client.app.state.database, "admin")  # type: ignore[attr-defined]
        assert client.get(profiles, headers=admin).status_code == 200


@pytest.mark.parametrize("key", ['a"b', "a'b", "a.b", "a]b", "$", "a b", "ü"])
def test_jobs_can_be_filtered_by_any_metadata_key(client: TestClient, key: str) -> None:
    job = submit(client, metadata={key: "v"})
    submit(client, metadata={"other": "v"})
    found = client.get(PATH, params={f"metadata[{key}]": "v"}).json()["data"]
    assert [each["id"] for each in found] == [job["id"]]


@pytest.mark.parametrize("number", ["1" * 5000, "-" + "9" * 4999, "1e5000", "1" * 3000])
def test_numbers_with_thousands_of_digits_are_rejected(client: TestClient, number: str) -> None:
    body = json.dumps({**JOB, "seed": "#"}).replace('"#"', number)
    for path in (SUBMIT, CALCULATE, "/v1/fine_tuning/jobs"):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 422), answer.text


def test_uploading_an_identical_file_repairs_a_damaged_copy(database: Database, settings: Settings) -> None:
    """A damaged copy never becomes the content of the new file."""

    def store() -> Path:
        path = settings.files_dir / new_id("file")
        checked = content.store_lines("text", [{"text": "the same"}], path)
        equal = files.find_duplicate(database, path, checked)
        with database.writing() as session:
            files.add(session, path, checked, filename="a.jsonl", purpose="fine-tune", duplicate_id=equal)
        return path

    first = store()
    whole = first.read_bytes()
    first.write_bytes(b"damaged")
    second = store()
    assert first.read_bytes() == second.read_bytes() == whole
    assert first.stat().st_ino == second.stat().st_ino
    for _ in range(150):
        assert store().stat().st_ino == first.stat().st_ino


def test_what_a_killed_service_left_behind_is_removed_at_the_next_start(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:
        job = submit(client)
    upload = settings.files_dir / new_id("file")
    unsettled_files.mark(upload)  # as an upload does, which was killed before its row was there
    upload.write_text("half an upload")
    (settings.files_dir / f"{new_id('file')}.link").write_text("half a link")
    run = settings.runs_dir / new_id("ftjob")
    run.mkdir()
    unsettled_files.mark(run)  # as a deletion does, which was killed after its row was gone
    unsettled_files.mark(settings.runs_dir / job["id"])  # and one that was killed before
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:
        assert client.get(f"{PATH}/{job['id']}").status_code == 200
        assert len(list(settings.files_dir.iterdir())) == 1
        assert not run.exists()
        assert not unsettled_files.marked(settings.files_dir) + unsettled_files.marked(settings.runs_dir)


def test_cleanup_keeps_files_of_another_database(settings: Settings) -> None:
    """The database may have been deleted, or the URL may name another: files without a row are not ours."""
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:
        job = submit(client)
    run = settings.runs_dir / job["id"]
    run.mkdir()
    other = settings.model_copy(update={"database_url": f"sqlite:///{settings.data_dir}/other.db"})
    with TestClient(create_app(other), base_url="http://127.0.0.1:8000") as client:
        assert client.get(f"{PATH}/{job['id']}").status_code == 404
    assert run.exists()
    assert (settings.files_dir / job["dataset"]["file_id"]).exists()


def test_nothing_is_removed_while_another_service_works(settings: Settings, database: Database) -> None:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000"):
        upload = settings.files_dir / new_id("file")
        unsettled_files.mark(upload)
        upload.write_text("on its way")
        with TestClient(create_app(settings), base_url="http://127.0.0.1:8000"):
            assert upload.exists()
    assert clean(database, settings) == 1


@pytest.mark.sqlite
@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_that_was_replaced_is_not_written_to(settings: Settings, replaced: bool) -> None:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8000") as client:
        submit(client)
        path = settings.data_dir / "accrue.db"
        content = path.read_bytes()
        path.unlink()
        if replaced:
            path.write_bytes(content)
        assert client.post(SUBMIT, json=JOB).status_code == 503
        assert client.get("/readyz").status_code == 503


@pytest.mark.sqlite
def test_writing_to_a_deleted_database_file_is_rejected(settings: Settings, database: Database) -> None:
    with database.writing():
        pass
    (settings.data_dir / "accrue.db").unlink()
    with pytest.raises(ReplacedDatabase, match="deleted"), database.writing():
        pass


def test_old_files_that_are_needed_do_not_keep_others_from_being_deleted(
    database: Database, settings: Settings, client: TestClient
) -> None:
    with database.writing() as session:
        for number in range(120):
            own = {"id": f"file-{number:04}", "created_at": 0.0, "filename": "f", "purpose": "fine-tune",
                   "bytes": 1, "sha256": str(number), "format": "text", "examples": 1,
                   "inline": False}  # fmt: skip
            session.add(File(**own))
    for number in range(119):
        data = {"file_id": f"file-{number:04}", "max_length": 64}
        job = submit(client, dataset_config=data) if number % 60 == 0 else None
        assert job is None or job["id"]
    with database.writing() as session:
        jobs = session.scalars(select(Job)).all()
        for job_row in jobs:
            spec = dict(job_row.spec)
            spec["data"] = {**spec["data"], "validation": {"file_id": "file-0001"}}
            job_row.spec = spec
    assert delete_expired(database, settings, 1.0) >= 100


@pytest.mark.parametrize("text", ["a\\u0000b", "a\\ud800b"])
def test_a_line_with_text_that_cannot_be_stored_is_refused(text: str) -> None:
    with pytest.raises(BadLine, match="text: has a NUL"):
        parse_line(f'{{"text": "{text}"}}')


def followed(database: Database, job_id: str, then: Any) -> list[str]:
    """The types of a job's events as a stream tells them, to its end; `then` is done once the first came."""

    async def follow() -> list[str]:
        stream, types = EventStream(database), []
        async for event in stream.follow(stream.join(job_id)):
            if event is not None:
                types.append(event.type)
                if len(types) == 1:
                    await asyncio.to_thread(then)
        return types

    return asyncio.run(asyncio.wait_for(follow(), 60))


def test_the_stream_of_a_deleted_job_ends(database: Database) -> None:
    job_id = submitted(database)

    def delete() -> None:
        with database.writing() as session:
            session.delete(session.get_one(Job, job_id))

    assert followed(database, job_id, delete) == ["submitted"]


def test_the_stream_of_a_revoked_key_ends(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.security import keys

    monkeypatch.setattr(keys, "_KNOWN_FOR_SECONDS", 0.0)
    with service(settings) as (client, mine):
        job = client.post(SUBMIT, json=JOB, headers=mine).json()["id"]
        database: Database = client.app.state.database  # type: ignore[attr-defined]
        headers = {**mine, "Accept": "text/event-stream"}
        with client.stream("GET", f"{PATH}/{job}/events", headers=headers) as answer:
            lines = answer.iter_lines()
            assert "submitted" in next(lines)
            with database.writing() as session:
                key_id = session.scalars(select(Key.id)).first()
                keys.revoke(session, str(key_id))
            with database.writing() as session:
                lifecycle.cancel(session, job)
            assert "cancelled" not in "".join(lines)


def test_events_stay_in_order_when_a_host_s_clock_is_behind(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream continues after the last id it has seen, so no later event may sort before that id."""
    from app.storage import ids

    job_id = submitted(database)
    now = time.time_ns()
    for behind in (0, 3600, 7200):
        monkeypatch.setattr(ids.time, "time_ns", lambda behind=behind: now - behind * 10**9)
        with database.writing() as session:
            record_event_without_webhook(session, job_id, 0, f"behind-{behind}", "")
    with database.reading() as session:
        types = session.scalars(
            select(JobEvent.type).where(JobEvent.job_id == job_id).order_by(JobEvent.id)
        ).all()
    assert types == ["submitted", "behind-0", "behind-3600", "behind-7200"]


def test_an_upload_must_be_a_form_and_its_key_must_have_write(settings: Settings) -> None:
    with service(settings) as (client, mine):
        reader = key_for(client.app.state.database, "read")  # type: ignore[attr-defined]
        form = {"file": ("data.jsonl", b'{"text": "a"}\n')}
        refused = client.post("/v1/files", files=form, data={"purpose": "fine-tune"}, headers=reader)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        for kind in ("application/json", "application/x-www-form-urlencoded", "text/plain"):
            answer = client.post("/v1/files", content=b"{}", headers={**mine, "content-type": kind})
            assert answer.status_code == 415
        body = (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            b'{"text": "a"}\n\r\n--b--\r\n'
        )
        capitals = {**mine, "content-type": "Multipart/Form-Data; boundary=b"}
        assert client.post("/v1/files", content=body, headers=capitals).status_code == 200


def test_too_many_metadata_filters_are_rejected(client: TestClient) -> None:
    many = {f"metadata[k{number}]": "v" for number in range(17)}
    assert client.get(PATH, params=many).status_code == 422


def test_clients_can_join_while_the_stream_polls(database: Database) -> None:
    """From threads, as routes do."""

    async def crowd() -> None:
        stream = EventStream(database)
        follower = stream.join(submitted(database))
        following = asyncio.create_task(anext(stream.follow(follower)))
        await asyncio.gather(
            *(asyncio.to_thread(stream.join, "ftjob-none", "", f"key-{n}") for n in range(500))
        )
        assert (await asyncio.wait_for(following, 30)) is not None
        assert stream._looking is not None
        assert not stream._looking.done()
        stream._looking.cancel()

    asyncio.run(crowd())


def test_an_endless_request_head_is_rejected(settings: Settings) -> None:
    import socket

    import uvicorn

    from app.web.http_connections import MAX_HEAD_BYTES, LimitedHttpProtocol

    config = uvicorn.Config(create_app(settings), http=LimitedHttpProtocol, log_config=None, port=0)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        until(lambda: server.started)
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
            with contextlib.suppress(OSError):  # it may hang up while we are speaking
                for _ in range(100):
                    client.sendall(b"a" * MAX_HEAD_BYTES)
            client.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):  # to its end, which comes: a time-out fails the test
                    pass
        server.should_exit = True
        thread.join(30)
