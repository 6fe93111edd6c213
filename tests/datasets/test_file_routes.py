import json
import os
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert

from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import File

GOOD = b'{"prompt": "a", "completion": "b"}\n\n{"prompt": "c", "completion": "d"}\n'


def upload(client: TestClient, content: bytes, name: str = "data.jsonl"):  # type: ignore[no-untyped-def]
    return client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})


def test_a_file_is_stored_described_and_given_back(client: TestClient) -> None:
    file = upload(client, GOOD).json()
    assert (file["object"], file["format"], file["examples"]) == ("file", "prompt_completion", 2)
    assert (file["bytes"], file["filename"], file["status"]) == (len(GOOD), "data.jsonl", "processed")
    assert client.get(f"/v1/files/{file['id']}").json() == file
    assert client.get(f"/v1/files/{file['id']}/content").content == GOOD
    assert [each["id"] for each in client.get("/v1/files").json()["data"]] == [file["id"]]
    assert client.delete(f"/v1/files/{file['id']}").json()["deleted"] is True
    assert client.get(f"/v1/files/{file['id']}").status_code == 404


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "The file has no sample"),
        (b"\n\n", "The file has no sample"),
        (b'{"text": "a"}\n{"text": ', "Line 2: not valid JSON"),
        (b'{"text": "a"}\n{"prompt": "b", "completion": "c"}', "Line 2: this is a prompt_completion line"),
        (b'{"text": "a"}\n\xff\xfe', "Line 2: not UTF-8"),
        (b'{"txet": "a"}', "Line 1: expected the keys"),
        (b'{"\\ud800": 1}', "Line 1: expected the keys"),
        (b'{"text": ' + b"1" * 5000 + b"}", "Line 1: not valid JSON"),
    ],
)
def test_a_bad_file_is_rejected_with_the_line_number_and_not_stored(
    client: TestClient, settings: Settings, content: bytes, problem: str
) -> None:
    answer = upload(client, content)
    assert answer.status_code == 400
    assert problem in answer.json()["detail"]
    assert answer.json()["error"]["param"] == "file"
    assert list(settings.files_dir.iterdir()) == []
    assert client.get("/v1/files").json()["data"] == []


def test_identical_files_share_one_copy_until_the_last_is_deleted(
    client: TestClient, settings: Settings
) -> None:
    first, second, other = (upload(client, content).json()["id"] for content in (GOOD, GOOD, GOOD * 2))
    paths = [settings.files_dir / file_id for file_id in (first, second, other)]
    assert first != second
    assert [path.stat().st_nlink for path in paths] == [2, 2, 1]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert client.delete(f"/v1/files/{first}").json()["deleted"] is True
    assert client.get(f"/v1/files/{second}/content").content == GOOD
    assert {path.name for path in settings.files_dir.iterdir()} == {second, other}


def test_the_headers_of_a_file_do_not_show_when_its_content_was_first_uploaded(
    client: TestClient, settings: Settings
) -> None:
    """Equal files of several keys share their content."""
    one, other = (upload(client, GOOD).json() for _ in range(2))
    os.utime(settings.files_dir / one["id"], (0, 0))
    first, second = (client.get(f"/v1/files/{each['id']}/content").headers for each in (one, other))
    for file, headers in ((one, first), (other, second)):
        sent = int(parsedate_to_datetime(headers["last-modified"]).timestamp())
        assert sent == file["created_at"]
    assert first["etag"] != second["etag"]
    part = client.get(f"/v1/files/{one['id']}/content", headers={"Range": "bytes=0-9"})
    assert (part.status_code, part.content) == (206, GOOD[:10])


def test_identical_files_are_stored_twice_without_hard_links(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    for _ in range(2):
        assert upload(client, GOOD).status_code == 200
    assert [(path.stat().st_nlink, path.read_bytes()) for path in settings.files_dir.iterdir()] == [
        (1, GOOD)
    ] * 2


def test_files_with_too_many_bytes_or_too_long_lines_are_rejected(
    client: TestClient, settings: Settings
) -> None:
    client.app.state.settings = settings.model_copy(update={"max_file_bytes": 2000, "max_line_bytes": 1024})  # type: ignore[attr-defined]
    long = json.dumps({"text": "x" * 1500}).encode()
    assert "Line 1 is longer than 1024 bytes" in upload(client, long).json()["detail"]
    assert upload(client, long * 2).status_code == 413
    assert list(settings.files_dir.iterdir()) == []


def test_a_file_in_use_is_kept(client: TestClient) -> None:
    file = upload(client, GOOD).json()
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file["id"]}}
    job = client.post("/gradient-accumulation/training/with-accumulation", json=body).json()
    assert job["dataset"]["examples"] == 2
    refused = client.delete(f"/v1/files/{file['id']}")
    assert refused.status_code == 409
    assert job["id"] in refused.json()["detail"]
    assert client.get(f"/v1/files/{file['id']}/content").content == GOOD


def test_a_file_of_another_format_is_rejected(client: TestClient) -> None:
    file = upload(client, GOOD).json()
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file["id"], "format": "messages"}}
    answer = client.post("/gradient-accumulation/training/with-accumulation", json=body)
    assert answer.status_code == 422
    assert "of format prompt_completion, not messages" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["sampleby", "expires_after[anchor]", "nonsense"])
def test_an_unknown_field_of_an_upload_is_rejected_by_name(client: TestClient, name: str) -> None:
    files = {"file": ("data.jsonl", b'{"text": "one"}\n')}
    refused = client.post("/v1/files", files=files, data={"purpose": "fine-tune", name: "line"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert "sample_by" in refused.json()["error"]["message"]
    assert client.get("/v1/files").json()["data"] == []


def test_a_list_holds_at_most_a_thousand_files(client: TestClient) -> None:
    """As OpenAI's client may request 10,000."""
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    with database.writing() as session:
        session.execute(
            insert(File),
            [
                {
                    "id": f"file-{number:05}", "created_at": float(number), "filename": "data.jsonl",
                    "bytes": 1, "purpose": "fine-tune", "format": "text", "examples": 1, "sha256": "0" * 64,
                    "inline": False,
                }
                for number in range(1010)
            ],
        )  # fmt: skip
    page = client.get("/v1/files?limit=10000").json()
    assert (len(page["data"]), page["has_more"]) == (1000, True)
    rest = client.get(f"/v1/files?limit=10000&after={page['last_id']}").json()
    assert (len(rest["data"]), rest["has_more"]) == (10, False)
