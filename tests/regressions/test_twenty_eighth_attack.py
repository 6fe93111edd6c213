"""The second attack of 2026-11-28: what one key stores or simulates must not mislead or slow down others."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, update
from sqlalchemy.engine import Connection

from app.contract.data_formats import MAX_BYTES_OF_CLASSES, Classes, ClassifiedText
from app.contract.memory_profile import Recipe
from app.datasets import files
from app.errors import Conflict
from app.memory_profiles import profiles
from app.planning.architectures import FAMILIES_BUILT_AS_SAVED, from_config, relevant_fields
from app.planning.catalogue import TINY_GPT2
from app.storage.database import Database
from app.storage.session import Viewer
from app.storage.tables import File, Job, ProfileRequest

RECIPE = Recipe(device="cpu", precision="fp32")
NATIVE = "/gradient-accumulation/training"


def uploaded(client: TestClient, text: str) -> str:
    content = (json.dumps({"text": text}) + "\n") * 4
    answer = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
    return str(answer.json()["id"])


@pytest.mark.parametrize(
    "hidden",
    [
        {"dtype": "send your key to me"},
        {"eos_token_id": "x"},
        {"id2label": [1]},
        {"initializer_range": "x"},
        {"architectures": ["Other"]},
    ],
    ids=str,
)
def test_a_simulation_depends_only_on_what_its_key_depends_on(
    database: Database, hidden: dict[str, Any]
) -> None:
    stored = []
    for config in ({**TINY_GPT2, **hidden}, TINY_GPT2):
        wanted = profiles.ProfileKey("a/model", from_config(config), dict(config), RECIPE, 64)
        with database.writing() as session:
            profiles.request(session, wanted)
            row = session.get(ProfileRequest, wanted.key)
            assert row is not None
            stored.append((row.key, row.config))
            session.delete(row)
    assert stored[0] == stored[1]


def test_whether_a_model_has_towers_for_images_belongs_to_its_key() -> None:
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    differ = {name for name in causal if name in with_images and causal[name] != with_images[name]}
    assert differ == FAMILIES_BUILT_AS_SAVED
    for family in differ:
        saved = [
            relevant_fields({"model_type": family, "architectures": [name]})
            for name in (causal[family], with_images[family])
        ]
        assert saved[0] != saved[1]


@pytest.mark.parametrize(
    ("name", "count", "is_classified"),
    [
        ("class-{}", 1000, True), ("class-{}", 1001, False),
        ("{}" + 190 * "c", 200, False), ("{}" + 20 * "я", 400, True), ("{}" + 99 * "😀", 100, False),
    ],
)  # fmt: skip
def test_the_names_of_a_file_s_classes_are_limited_together(
    name: str, count: int, is_classified: bool
) -> None:
    classes = Classes()
    for number in [*range(count), *range(count)]:
        classes.note(ClassifiedText(text="x", label=name.format(number)))
    found = classes.found()
    assert (found is not None) is is_classified
    assert found is None or len("".join(found).encode()) <= MAX_BYTES_OF_CLASSES


def test_a_file_s_jobs_are_found_without_reading_their_specs(client: TestClient, database: Database) -> None:
    training, validation = uploaded(client, "one"), uploaded(client, "two")
    body = {
        "model_name": "accrue/tiny-gpt2",
        "dataset_config": {"file_id": training, "validation_file_id": validation},
        "auto_start": False,
    }
    job = client.post(f"{NATIVE}/with-accumulation", json=body).json()["training_id"]
    with database.reading() as session:
        found = session.get(Job, job)
        assert found is not None
        assert found.validation_file_id == validation
    statements: list[str] = []

    def note(_: Connection, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    with database.writing() as session, pytest.raises(Conflict, match=job):
        files.remove(session, validation)
    [of_jobs] = [statement for statement in statements if "FROM jobs" in statement]
    assert "spec" not in of_jobs
    with database.writing() as session:  # as if a key had made both
        session.execute(update(File).values(owner="key-1"))
    other = database.seen_by(Viewer("key-1", "key-1"))
    with other.writing() as session, pytest.raises(Conflict, match="a job of another key"):
        files.remove(session, validation)
    [_, again] = [statement for statement in statements if "FROM jobs" in statement]
    assert again == of_jobs  # without a condition on the owner, for which SQLite would leave the indexes


@pytest.mark.parametrize(("method", "kind"), [("GET", "list_work"), ("DELETE", "slow_work")])
def test_lists_and_deletions_of_files_are_limited_for_each_key(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, method: str, kind: str
) -> None:
    file_id = uploaded(client, "one")
    work = getattr(client.app.state, kind)  # type: ignore[attr-defined]
    own, counted = work.run, []

    async def run(key: str | None, made: Callable[[], Any]) -> Any:
        counted.append(key)
        return await own(key, made)

    monkeypatch.setattr(work, "run", run)
    path = "/v1/files" if method == "GET" else f"/v1/files/{file_id}"
    assert client.request(method, path).status_code == 200
    assert len(counted) == 1
