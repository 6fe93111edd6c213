"""Keys, scopes and ownership, on every route."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from threading import Thread

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app.errors import BadSetting
from app.main import create_app
from app.security import keys
from app.security.authentication import by_key
from app.security.keys import Keyring, is_well_formed, new_key
from app.security.local import require_keys_off_loopback
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Key
from tests.harness.requests import JOB, PATH, key_for
from tests.harness.runs import until

OPEN = {"/healthz", "/readyz"}
"""Routes that need no key: anybody may ask whether the service is up."""


@pytest.fixture
def database(client: TestClient) -> Database:
    found: Database = client.app.state.database  # type: ignore[attr-defined]
    return found


@pytest.fixture
def keyring(database: Database) -> Iterator[Keyring]:
    """A keyring that has not seen any key yet."""
    with closing(Keyring(database)) as made:
        yield made


@pytest.fixture
def theirs(client: TestClient, database: Database) -> tuple[dict[str, str], dict[str, str]]:
    """The header of a key, and one of each thing made with it: the value of every path parameter."""
    header = key_for(database)
    upload = {"file": ("data.jsonl", b'{"text": "theirs"}\n')}
    file = client.post("/v1/files", files=upload, data={"purpose": "fine-tune"}, headers=header).json()
    config = client.post(
        "/gradient-accumulation/config", json={"target_effective_batch_size": 8}, headers=header
    ).json()
    job = client.post(f"{PATH}/with-accumulation", json=JOB, headers=header).json()
    swept = {
        "model_name": JOB["model_name"], "dataset_config": {"file_id": file["id"]}, "name": "sweep-of-theirs",
        "vary": {"learning_rate": [1e-5, 1e-4]},
    }  # fmt: skip
    sweep = client.post("/gradient-accumulation/sweeps", json=swept, headers=header).json()
    made = {
        "sweep_name": sweep["name"],
        "file_id": file["id"], "config_id": config["config_id"], "training_id": job["id"],
        "fine_tuning_job_id": job["id"], "identifier": job["id"],
        "profile_id": "profile-000000000000",  # measurements are everybody's
        "tool": "trl",
        "name": "trace.json",
        "export_id": "export-00000000000000000000000000",  # found by its job's id only
        "model": f"ft:accrue/tiny-gpt2:accrue::{job['id'].removeprefix('ftjob-')}",
    }  # fmt: skip
    return header, made


def operations(client: TestClient) -> Iterator[tuple[str, str]]:
    """Every method and path of the service."""
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            yield method.upper(), path


def without(id_: str, text: str) -> str:
    """An answer's text with the id that was asked for, and its random part, replaced by "ID"."""
    return text.replace(id_, "ID").replace(id_.partition("-")[2], "ID")


def test_objects_of_another_key_look_like_missing_ones(
    client: TestClient, database: Database, theirs: tuple[dict[str, str], dict[str, str]]
) -> None:
    _, made = theirs
    mine = key_for(database)
    tried = 0
    for method, path in operations(client):
        for name in re.findall(r"{(\w+)", path):
            id_ = made[name]  # a new kind of id: make one of it above
            nobody_s = re.sub(r"[0-9a-f]{12}$", "0" * 12, id_)
            answers = [
                client.request(method, path.replace("{" + name + "}", each), headers=mine, json={})
                for each in (id_, nobody_s)
            ]
            first, second = (
                (answer.status_code, without(each, answer.text))
                for answer, each in zip(answers, (id_, nobody_s), strict=True)
            )
            assert first == second, (method, path)
            tried += 1
    assert tried > 25


def test_lists_and_counts_reveal_nothing_about_other_keys(
    client: TestClient, database: Database, theirs: tuple[dict[str, str], dict[str, str]]
) -> None:
    header, made = theirs
    mine = key_for(database)
    ids = {id_ for name, id_ in made.items() if name != "model"}
    for method, path in operations(client):
        if method == "GET" and "{" not in path and path != "/openapi.json":
            answer = client.get(path, headers=mine)
            assert not [id_ for id_ in ids if id_ in answer.text], path
    totals = "/gradient-accumulation/stats"
    counted = {name: client.get(totals, headers=each).json()["jobs"] for name, each in
               {"theirs": header, "mine": mine, "admin": key_for(database, "admin")}.items()}  # fmt: skip
    assert counted == {"theirs": 3, "mine": 0, "admin": 3}


def test_a_job_cannot_be_made_of_another_key_s_file_or_configuration(
    client: TestClient, database: Database, theirs: tuple[dict[str, str], dict[str, str]]
) -> None:
    _, made = theirs
    mine = key_for(database)
    for body in (
        {**JOB, "dataset_config": {"file_id": made["file_id"]}},
        {**JOB, "config_id": made["config_id"]},
    ):
        assert client.post(f"{PATH}/with-accumulation", json=body, headers=mine).status_code == 404


def test_a_key_is_required_once_one_exists(client: TestClient, database: Database, keyring: Keyring) -> None:
    assert client.get(PATH).status_code == 200
    with database.writing() as session:
        keys.create(session, "first", ["read"], None)
    client.app.state.authenticate = by_key(keyring)  # type: ignore[attr-defined]
    for method, path in operations(client):
        answer = client.request(method, re.sub("{.*?}", "ftjob-1", path))
        assert (answer.status_code == 401) == (path not in OPEN), (method, path)
        if path not in OPEN:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_scopes(client: TestClient, database: Database) -> None:
    reads, writes = key_for(database, "read"), key_for(database, "write")
    assert client.get(PATH, headers=reads).status_code == 200
    refused = client.post(f"{PATH}/with-accumulation", json=JOB, headers=reads)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert client.get(PATH, headers=writes).status_code == 403
    calculated = client.post(
        "/gradient-accumulation/calculate-effective-batch-size?actual_batch_size=8&accumulation_steps=4",
        headers=reads,
    )
    assert calculated.status_code == 200


def test_a_key_that_was_revoked_or_expired_opens_nothing(
    client: TestClient, database: Database, keyring: Keyring
) -> None:
    with database.writing() as session:
        row, key = keys.create(session, "short", ["read"], None)
        _, expired = keys.create(session, "expired", ["read"], 60)
    with database.writing() as session:
        session.execute(update(Key).where(Key.id != row.id).values(expires_at=1.0))
    header = {"Authorization": f"Bearer {key}"}
    assert client.get(PATH, headers=header).status_code == 200
    assert client.get(PATH, headers={"Authorization": f"Bearer {expired}"}).status_code == 401
    with database.writing() as session:
        keys.revoke(session, row.id)
    client.app.state.authenticate = by_key(keyring)  # type: ignore[attr-defined]
    assert client.get(PATH, headers=header).status_code == 401


def test_only_the_digest_of_a_key_is_stored(client: TestClient, database: Database) -> None:
    header = key_for(database)
    client.get(PATH, headers=header)

    def used() -> Key | None:
        with database.reading() as session:
            row: Key | None = session.query(Key).filter(Key.last_used_at.is_not(None)).one_or_none()
        return row

    until(lambda: used() is not None)
    row = used()
    assert row is not None
    kept = json.dumps({column.name: getattr(row, column.name) for column in Key.__table__.columns})
    assert header["Authorization"].split()[1] not in kept


def test_a_request_does_not_wait_until_the_use_of_its_key_is_recorded(
    client: TestClient, database: Database
) -> None:
    """Another process may hold the lock for writing for seconds."""
    header = key_for(database)
    with database.writing() as session:
        session.execute(update(Key).values(last_used_at=1.0))
        began = time.monotonic()
        assert client.get(PATH, headers=header).status_code == 200
        assert time.monotonic() - began < 2.0


def test_a_keyring_closes_once_no_use_of_a_key_is_being_recorded(database: Database) -> None:
    """Otherwise the database would be closed while a connection is in use."""
    key = key_for(database)["Authorization"].split()[1]
    keyring = Keyring(database)
    closing_it = Thread(target=keyring.close)
    with database.writing() as session:
        session.execute(update(Key).values(last_used_at=1.0))
        assert keyring.find(key) is not None
        until(lambda: not keyring._uses._work_queue.qsize())  # the use is being recorded, and waits
        closing_it.start()
        closing_it.join(0.3)
        assert closing_it.is_alive()
    closing_it.join(10)
    assert not closing_it.is_alive()
    with database.reading() as session:
        assert session.scalar(select(Key.last_used_at)) != 1.0


def test_a_mistyped_key_is_recognised_by_its_checksum() -> None:
    key = new_key()
    assert is_well_formed(key)
    assert not is_well_formed(key[:-1] + ("0" if key[-1] != "0" else "1"))
    assert not is_well_formed(key[:10] + ("A" if key[10] != "A" else "B") + key[11:])
    assert not any(map(is_well_formed, ("", "ak_", "sk-abc", key[3:], key + "0")))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.10", "::", "accrue.example.org"])
def test_off_loopback_the_service_starts_only_with_a_key(database: Database, host: str) -> None:
    with pytest.raises(BadSetting, match="accrue keys create"):
        require_keys_off_loopback(host, database)
    key_for(database)
    require_keys_off_loopback(host, database)


def test_a_page_of_another_site_cannot_drive_an_open_service(client: TestClient) -> None:
    rebound = {"Host": "evil.example", "Authorization": "Bearer none"}
    assert client.get(PATH, headers=rebound).status_code == 403
    assert client.get(PATH, headers={**rebound, "Authorization": f"Bearer {new_key()}"}).status_code == 401


def test_a_service_with_keys_off_loopback_accepts_any_host_name(settings: Settings) -> None:
    wide = settings.model_copy(update={"host": "0.0.0.0"})
    with TestClient(create_app(wide), base_url="http://accrue.example.org") as client:
        header = key_for(client.app.state.database)  # type: ignore[attr-defined]
        assert client.get(PATH, headers=header).status_code == 200
        assert client.get("/healthz").status_code == 200
