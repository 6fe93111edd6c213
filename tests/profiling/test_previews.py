"""Previews on their way from the service to a worker's profiler and back."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from app.contract.model_reference import ModelReference
from app.contract.preview import DatasetPreview, PreviewSpec
from app.contract.spec import DataSpec
from app.datasets import content, files, previews
from app.errors import Conflict, Unavailable, Unprocessable
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import PreviewRequest, Worker
from tests.harness import hostile_previews
from tests.harness.runs import until
from tests.harness.specs import make_spec
from workers.profiling import previews as profiler


@pytest.fixture
def order(database: Database, settings: Settings) -> PreviewSpec:
    settings.make_directories()
    path = settings.files_dir / "file-1"
    path.write_text(json.dumps({"text": "a secret"}) + "\n")
    checked = content.check(path, settings, field="file")
    with database.writing() as session:
        files.add(session, path, checked, filename="f.jsonl", purpose="fine-tune")
    data = DataSpec(
        file_id="file-1", sha256=checked.sha256, format="text", examples=1, max_length=64,
        overlength="truncate", packing=False, validation=None,
    )  # fmt: skip
    return PreviewSpec(model=make_spec().model, data=data, shown=1)


def worker(database: Database) -> None:
    with database.writing() as session:
        now = session.scalar(select(database_now()))
        session.add(
            Worker(id="worker-1", hostname="h", started_at=now, heartbeat_at=now, devices=[], running=[])
        )


def requested(database: Database, settings: Settings, order: PreviewSpec) -> DatasetPreview:
    """Requests a preview as the service does, in a thread, while this thread acts as the profiler."""
    with ThreadPoolExecutor(1) as service:
        heard = service.submit(asyncio.run, previews.ask(database, order, 90.0))
        until(lambda: heard.done() or profiler.answer_one(database, settings), 90)
        return heard.result(90)


def test_a_preview_is_made_by_the_profiler_and_not_kept(
    database: Database, settings: Settings, order: PreviewSpec
) -> None:
    worker(database)
    assert not profiler.answer_one(database, settings)
    seen = requested(database, settings, order)
    assert "".join(seen.samples[0].tokens) == "a secret<|endoftext|>"
    assert seen.lengths.examples == 1
    with database.reading() as session:
        assert session.scalars(select(PreviewRequest)).all() == []


def test_without_a_worker_the_request_fails_at_once(database: Database, order: PreviewSpec) -> None:
    with pytest.raises(Conflict, match="accrue worker"):
        asyncio.run(previews.ask(database, order, 30.0))


def test_a_preview_request_times_out_if_no_worker_serves_it(database: Database, order: PreviewSpec) -> None:
    worker(database)
    with pytest.raises(Unavailable, match="try again"):
        asyncio.run(previews.ask(database, order, 0.1))
    with database.reading() as session:
        assert not previews.has_unclaimed(session)


@pytest.mark.thorough
def test_data_that_the_trainer_could_not_read_is_rejected_with_the_reason(
    database: Database, settings: Settings, order: PreviewSpec
) -> None:
    worker(database)
    chat = order.model_copy(update={"data": order.data.model_copy(update={"format": "messages"})})
    with pytest.raises(Unprocessable, match="line 1 of the data"):
        requested(database, settings, chat)
    local = ModelReference(name="none", source="local", architecture=order.model.architecture)
    with pytest.raises(Unprocessable, match="tokenizer of none could not be loaded") as refused:
        requested(database, settings, order.model_copy(update={"model": local}))
    assert "secret" not in str(refused.value)


def test_an_endless_template_is_killed(
    database: Database, settings: Settings, order: PreviewSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(database)
    monkeypatch.setattr(profiler, "_make_preview", hostile_previews.endless)
    monkeypatch.setattr(profiler, "_SECONDS", 0.2)
    with pytest.raises(Unprocessable, match="took longer"):
        requested(database, settings, order)


@pytest.mark.thorough
def test_a_preview_ends_with_the_process_that_its_worker_started(
    settings: Settings, order: PreviewSpec, tmp_path: Path
) -> None:
    """The preview holds nothing open that would keep the fork server alive, and ends with that server."""
    script = f"""
import multiprocessing, sys
from pathlib import Path
from app.contract.preview import PreviewSpec
from tests.harness import hostile_previews
from workers.profiling import previews
if __name__ == "__main__":
    order = PreviewSpec.model_validate_json(sys.stdin.read())
    where = ("{settings.files_dir / "file-1"}", "{tmp_path}", "{settings.data_dir}")
    child = previews._children().Process(
        target=previews._child_main,
        args=(hostile_previews.endless, order, "model", *map(Path, where)),
        daemon=True,
    )
    child.start()
    print(child.pid, flush=True)
    child.join()
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(order.model_dump_json().encode())
        worker.stdin.close()
        pid = int(worker.stdout.readline())
        until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text() != "", 30)
        worker.kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), 30)


def test_abandoned_preview_requests_are_deleted(database: Database, order: PreviewSpec) -> None:
    worker(database)
    with database.writing() as session:
        session.add(
            PreviewRequest(
                id="preview-0", created_at=0.0, file_id="file-1", order=order.model_dump(mode="json"),
                answer={"of": "one who has gone"},
            )
        )  # fmt: skip
    with pytest.raises(Unavailable):
        asyncio.run(previews.ask(database, order, 0.0))
    with database.reading() as session:
        assert session.get(PreviewRequest, "preview-0") is None


@pytest.mark.parametrize(
    "how", [hostile_previews.exits, hostile_previews.takes_memory, hostile_previews.panics]
)
def test_a_tokenizer_that_kills_its_process_does_not_kill_the_profiler(
    database: Database, settings: Settings, order: PreviewSpec, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    worker(database)
    monkeypatch.setattr(profiler, "_make_preview", how)
    made, error = profiler._make_in_child(order, settings)
    assert made is None
    assert error is not None
    assert "tokenizer" in error
    assert "training text" not in error


def test_a_tokenizer_cannot_access_the_database_or_secrets(
    database: Database, settings: Settings, order: PreviewSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(database)
    monkeypatch.setenv("ACCRUE_DATABASE_URL", "postgresql://somebody:secret@host/jobs")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    profiler._children.cache_clear()
    monkeypatch.setattr(profiler, "_make_preview", hostile_previews.collects_secrets)
    _, error = profiler._make_in_child(order, settings)
    assert error is not None
    assert "(Found0)" in error
    assert os.environ["HF_TOKEN"] == "hf_secret"
