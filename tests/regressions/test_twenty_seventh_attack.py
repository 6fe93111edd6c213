"""The attack of 2026-11-28: what a trainer writes, and one key's reading of it, must not stop others."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import insert, select, update

from app.contract.reports import EventLine, is_usable
from app.errors import TooManyRequests
from app.results import run_files
from app.results.series import evaluations, page_of_steps, series
from app.settings import Settings
from app.storage.database import Database
from app.storage.stored_files import checkpoint_names
from app.storage.tables import JobEvent, StepMetric
from app.web.concurrency import SlowWork, in_turns
from tests.harness.claims import claim
from tests.harness.ingestion import read_once
from tests.harness.log_lines import line
from tests.harness.runs import create_run
from tests.harness.submissions import submitted
from workers import ingest as ingestion
from workers.ingest import Position

NATIVE = "/gradient-accumulation/training"
MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("metric", {}),
    ("metric", {"step": "abc", "name": "a", "value": 1.0}),
    ("metric", {"step": 2**40, "name": "a", "value": 1.0}),
    ("metric", {"step": 1, "name": ["a"], "value": 1.0}),
    ("metric", {"step": "1", "name": "a", "value": 1.0}),
    ("metric", {"step": 1, "name": "a", "value": "much"}),
    ("evaluation", {"step": 1, "loss": 1.0, "rewards": "x"}),
    ("evaluation", {"step": 1, "loss": 1.0, "rewards": {"margin": "x"}}),
    ("evaluation", {"step": 1, "loss": 1.0, "token_accuracy": "abc"}),
    ("evaluation", {"step": True, "loss": 1.0}),
    ("checkpoint", {"step": 1, "name": 7}),
]


@pytest.mark.parametrize(("kind", "data"), MALFORMED)
def test_events_of_another_type_than_results_need_are_ignored(
    client: TestClient, database: Database, kind: str, data: dict[str, Any]
) -> None:
    assert not is_usable(kind, data)
    job_id = submitted(database)
    with database.writing() as session:  # as an earlier version stored it
        session.add(
            JobEvent(
                job_id=job_id, id="ftevent-1", attempt=1, created_at=1.0, level="info", type=kind,
                message="", data=data,
            )
        )  # fmt: skip
        assert evaluations(session, job_id) == {}
    for path in ("metrics", "metrics?format=csv", "metrics?points=10"):
        assert client.get(f"{NATIVE}/{job_id}/{path}").status_code == 200
    run = client.app.state.settings.runs_dir / job_id  # type: ignore[attr-defined]
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for path in ("events", "checkpoints"):
        assert client.get(f"/v1/fine_tuning/jobs/{job_id}/{path}").status_code == 200


def test_events_that_results_need_are_used() -> None:
    rewards = {"margin": 0.1, "divergence": None}
    assert is_usable("evaluation", {"step": 1, "loss": None, "rewards": rewards, "token_accuracy": 0.5})
    assert is_usable("metric", {"step": 0, "name": "own", "value": None})
    assert is_usable("checkpoint", {"step": 3, "name": "step-3"})
    assert is_usable("anything", {"step": "x"})


def test_an_event_has_a_limited_number_of_values() -> None:
    def event(data: dict[str, Any]) -> EventLine:
        content = {"attempt": 1, "time": 1.0, "type": "x", "level": "info", "message": "", "data": data}
        return EventLine.model_validate_json(json.dumps(content))

    assert event({"a": [[[]] * 30] * 100}).data != {}
    assert event({"a": [[[]] * 900] * 32}).data == {}


def test_events_are_stored_in_short_transactions(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "_SECONDS_AT_ONCE", 0.0)
    submitted(database)
    fence = claim(database)
    assert fence is not None
    run = create_run(tmp_path / "run")
    event = {"attempt": 1, "time": 1.0, "type": "x", "level": "info", "message": "", "data": {}}
    run.events.write_text((json.dumps(event) + "\n") * 5)
    position, stored = Position(), []
    for number in range(5):
        position = read_once(database, run, fence, position)
        assert position.caught_up == (number == 5) or number == 4
        with database.reading() as session:
            own = select(JobEvent).where(JobEvent.job_id == fence.job_id, JobEvent.type == "x")
            stored.append(len(session.scalars(own).all()))
    assert stored == [1, 2, 3, 4, 5], "each event once, and at least one at a time"


def with_steps(database: Database, count: int, losses: int, short: int = 0) -> str:
    """A job with steps of that many micro-batches, after some of one."""
    job_id = submitted(database)
    rows = [
        {**vars(line(step)), "job_id": job_id, "micro_losses": [0.5] * (1 if step <= short else losses)}
        for step in range(1, short + count + 1)
    ]
    with database.writing() as session:
        session.execute(insert(StepMetric), rows)
    return job_id


def test_pages_of_long_lines_have_few_of_them(database: Database) -> None:
    job_id = with_steps(database, 100, 10_000, short=50)
    step: int | None = 1
    sizes, read = [], []
    with database.reading() as session:
        while step is not None:
            lines, step = page_of_steps(session, job_id, step)
            sizes.append(sum(len(each["micro_losses"]) for each in lines))
            read += [each["step"] for each in lines]
    assert read == list(range(1, 151))
    assert max(sizes) < 300_000, "about a million characters"


@pytest.mark.parametrize("points", [50, 300])
def test_points_leave_very_long_lists_out(database: Database, points: int) -> None:
    """Also if there are no more steps than points."""
    long, short = with_steps(database, 60, 30_000), with_steps(database, 60, 4)
    with database.reading() as session:
        assert {each["micro_losses"] for each in series(session, long, 0, points)} == {None}
        found = series(session, short, 0, points)
    assert len(found) == min(points, 60)
    assert len(found[0]["micro_losses"]) == 4


def test_rewards_are_kept_beside_long_lists(database: Database) -> None:
    job_id = with_steps(database, 100, 10_000)
    with database.writing() as session:
        session.execute(update(StepMetric).values(rewards={"margin": 0.5}))
        found = series(session, job_id, 0, 100)
    assert {each["rewards"]["margin"] for each in found} == {0.5}
    assert found[0]["micro_losses"] is None


def test_a_step_has_a_limited_number_of_metrics(database: Database) -> None:
    job_id = submitted(database)
    rows = [
        {"job_id": job_id, "id": f"ftevent-{number}", "attempt": 1, "created_at": 1.0, "level": "info",
         "type": "metric", "message": "", "data": {"step": 1, "name": f"m{number}", "value": 1.0}}
        for number in range(300)
    ]  # fmt: skip
    with database.writing() as session:
        session.execute(insert(JobEvent), rows)
        assert len(evaluations(session, job_id)[1].metrics or {}) == 50


def test_lines_that_an_earlier_version_stored_are_still_shown(client: TestClient, database: Database) -> None:
    job_id = with_steps(database, 2, 10_001)
    lines = client.get(f"{NATIVE}/{job_id}/log").text.splitlines()
    assert [json.loads(each)["micro_losses"] for each in lines] == [None, None]


async def comes_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_parts_of_streams_take_turns() -> None:
    """No key occupies more than two threads, however many streams it reads."""
    begun, may_end = [], threading.Event()

    def parts() -> Iterator[int]:
        for part in range(3):
            begun.append(part)
            may_end.wait(30)
            yield part

    async def read_all() -> list[list[int]]:
        work = SlowWork()

        async def stream() -> list[int]:
            return [part async for part in in_turns(lambda make: work.go_on("key", make), parts())]

        reading = [asyncio.create_task(stream()) for _ in range(8)]
        await comes_true(lambda: work._turns.requests("key") == 8 and len(begun) >= 2)
        assert len(begun) == 2, "the other six wait"
        may_end.set()
        return list(await asyncio.gather(*reading))

    assert asyncio.run(read_all()) == [[0, 1, 2]] * 8


def test_folders_with_many_entries_are_not_listed_whole(settings: Settings, tmp_path: Path) -> None:
    run = settings.runs_dir / "ftjob-1"
    (run / "profile").mkdir(parents=True)
    for number in range(300):
        (run / "profile" / f"{number}").touch()
        (run / "checkpoints" / f"step-{number}").mkdir(parents=True)
    (run / "profile" / "memory.pickle").touch()
    assert run_files.profile_files(settings, "ftjob-1") == ["memory.pickle"]
    assert len(checkpoint_names(settings, "ftjob-1")) == 100
    linked = settings.runs_dir / "ftjob-2"
    linked.mkdir()
    (linked / "checkpoints").symlink_to(run / "checkpoints")
    assert checkpoint_names(settings, "ftjob-2") == set()


def test_a_stream_that_has_begun_is_not_refused() -> None:
    """Other requests of its key may have filled the queue since."""

    async def read() -> list[int]:
        work, may_end = SlowWork(), threading.Event()
        others = [asyncio.create_task(work.run("key", may_end.wait)) for _ in range(100)]
        await comes_true(lambda: work._turns.requests("key") == 100)
        with pytest.raises(TooManyRequests):
            await work.run("key", may_end.wait)
        stream = in_turns(lambda make: work.go_on("key", make), iter([1, 2]))
        reading = asyncio.create_task(anext(stream))
        await comes_true(lambda: work._turns.requests("key") == 101)
        may_end.set()
        await asyncio.gather(*others)
        return [await reading, *[part async for part in stream]]

    assert asyncio.run(read()) == [1, 2]
