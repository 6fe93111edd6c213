"""Folders in object storage: versions, and what readers see while they change."""

import io
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.errors import Unavailable
from app.settings import Settings
from app.storage.objects import Damaged, Manifest, ObjectStorage, StoredFolder


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def storage(bucket: Path) -> ObjectStorage:
    return ObjectStorage(f"file://{bucket}")


@pytest.fixture
def run(storage: ObjectStorage) -> StoredFolder:
    return StoredFolder(storage, "runs/ftjob-1")


def publish(run: StoredFolder, attempt: int, number: int, files: dict[str, str]) -> Manifest:
    stored = {
        path: run.store(attempt, number, path, io.BytesIO(text.encode())) for path, text in files.items()
    }
    manifest = Manifest(attempt=attempt, number=number, files=stored)
    run.publish(manifest)
    return manifest


def content_of(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_a_folder_is_fetched_as_it_was_stored(run: StoredFolder, tmp_path: Path) -> None:
    assert run.newest() is None
    assert run.fetch(tmp_path / "copy") is None
    files = {"a": "1", "model/config.json": "{}", "checkpoints/step-1/deep/x": "2"}
    manifest = publish(run, 1, 1, files)
    assert run.newest() == manifest
    assert run.fetch(tmp_path / "copy") == manifest
    assert content_of(tmp_path / "copy") == files
    only = tmp_path / "model"
    run.fetch(only, lambda path: path.startswith("model/"))
    assert content_of(only) == {"model/config.json": "{}"}


def test_what_was_fetched_before_is_not_fetched_again(
    run: StoredFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, read = tmp_path / "copy", []
    plain = ObjectStorage.read_into

    def counted(self: ObjectStorage, key: str, file: io.BytesIO) -> tuple[int, str]:
        read.append(key)
        return plain(self, key, file)

    monkeypatch.setattr(ObjectStorage, "read_into", counted)
    first = publish(run, 1, 1, {"same": "1", "gone": "2"})
    run.fetch(copy)
    new = publish(run, 1, 2, {"new": "3"}).files
    run.publish(Manifest(attempt=1, number=3, files={"same": first.files["same"], **new}))
    run.fetch(copy)
    assert content_of(copy) == {"same": "1", "new": "3"}
    assert len(read) == 3
    (copy / "new").unlink()
    run.fetch(copy)
    assert content_of(copy) == {"same": "1", "new": "3"}


def test_a_later_attempt_wins_whatever_an_earlier_one_goes_on_to_store(
    run: StoredFolder, tmp_path: Path
) -> None:
    publish(run, 1, 1, {"state": "old"})
    later = publish(run, 2, 1, {"state": "new"})
    run.delete_before(later)
    stale = publish(run, 1, 9, {"state": "stale"})
    run.delete_before(stale)
    assert run.newest() == later
    run.fetch(tmp_path / "copy")
    assert content_of(tmp_path / "copy") == {"state": "new"}


def test_replaced_versions_are_deleted_with_their_objects(run: StoredFolder, bucket: Path) -> None:
    first = publish(run, 1, 1, {"kept": "1", "replaced": "2"})
    new = publish(run, 1, 2, {"replaced": "3"}).files
    newest = Manifest(attempt=1, number=3, files={"kept": first.files["kept"], **new})
    run.publish(newest)
    run.delete_before(newest)
    assert set(content_of(bucket / "runs/ftjob-1")) == {
        "000001.000003.json", "000001/000001/kept", "000001/000002/replaced",
    }  # fmt: skip
    run.delete()
    assert content_of(bucket) == {}
    run.delete()  # nothing is left


def test_a_version_that_is_replaced_while_it_is_fetched(
    run: StoredFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run, 1, 1, {"a": "1", "b": "1"})
    plain, calls = ObjectStorage.read_into, iter(range(9))

    def replacing(self: ObjectStorage, key: str, file: io.BytesIO) -> tuple[int, str]:
        if next(calls) == 1:
            run.delete_before(publish(run, 1, 2, {"a": "2", "b": "2"}))
        return plain(self, key, file)

    monkeypatch.setattr(ObjectStorage, "read_into", replacing)
    run.fetch(tmp_path / "copy")
    assert content_of(tmp_path / "copy") == {"a": "2", "b": "2"}


def test_a_damaged_object_is_not_used(run: StoredFolder, bucket: Path, tmp_path: Path) -> None:
    stored = publish(run, 1, 1, {"weights": "right"}).files["weights"]
    (bucket / "runs/ftjob-1" / stored.key).write_text("wrong")
    with pytest.raises(Damaged, match="weights is damaged"):
        run.fetch(tmp_path / "copy")
    assert content_of(tmp_path / "copy") == {}
    (bucket / "runs/ftjob-1" / stored.key).unlink()
    with pytest.raises(Damaged, match="are missing"):
        run.fetch(tmp_path / "copy")


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"attempt":1,"number":9,"files":{"../x":{"key":"a","bytes":1,"sha256":""}}}']
)
def test_a_damaged_manifest_leaves_the_version_before_it(run: StoredFolder, bucket: Path, text: str) -> None:
    before = publish(run, 1, 1, {"a": "1"})
    (bucket / "runs/ftjob-1/000001.000009.json").write_text(text)
    assert run.newest() == before


def test_storage_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    storage = ObjectStorage(f"file://{tmp_path}/file")
    for use in (lambda: storage.write("a/b", b""), lambda: storage.write_from("a/b", io.BytesIO())):
        with pytest.raises(Unavailable, match="object storage"):
            use()


@pytest.mark.parametrize(
    ("url", "why"),
    [("bucket", "is not a URL"), ("nothing://bucket", "is not a URL"), ("gs://bucket", "another package")],
)
def test_a_url_that_cannot_be_used_is_refused_at_the_start(url: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Settings(object_storage=url, _env_file=None)
