"""Server-sent events: each arrives once and in order, after lost connections and for many clients."""

import asyncio
import signal
from typing import Any

import httpx2 as httpx
import pytest

from tests.harness.faults import submit
from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough

STREAM = {"Accept": "text/event-stream"}


def told(accrue: Accrue, job_id: str) -> list[str]:
    """The ids of a job's events, oldest first, as its list has them."""
    page = accrue.get(f"{TRAINING}/{job_id}/events?limit=100")
    assert not page["has_more"]
    return [event["id"] for event in reversed(page["data"])]


async def follow(accrue: Accrue, job_id: str, last: str | None = None, leave_after: int = 10**6) -> list[str]:
    """The ids of the events that a stream brings, until it ends or the follower leaves."""
    seen: list[str] = []
    headers = STREAM if last is None else {**STREAM, "Last-Event-ID": last}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=accrue.url, timeout=60, limits=limits) as client,
        client.stream("GET", f"{TRAINING}/{job_id}/events", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                seen.append(line[4:])
                if len(seen) == leave_after:
                    break
    return seen


def test_a_follower_who_lost_the_connection_misses_nothing(shared: Accrue) -> None:
    job_id = submit(shared, max_steps=30)
    first = asyncio.run(follow(shared, job_id, leave_after=3))
    rest = asyncio.run(follow(shared, job_id, last=first[-1]))
    assert [*first, *rest] == told(shared, job_id)
    ended = shared.http.get(f"{TRAINING}/{job_id}/events", headers={**STREAM, "Last-Event-ID": rest[-1]})
    assert ended.status_code == 204


def test_many_clients_follow_at_the_same_time(shared: Accrue) -> None:
    jobs = [submit(shared, max_steps=10) for _ in range(3)]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(follow(shared, jobs[n % 3]) for n in range(60)))

    seen = asyncio.run(all_of_them())
    expected = [told(shared, job_id) for job_id in jobs]
    assert seen == [expected[n % 3] for n in range(60)]


def test_the_service_stops_despite_open_event_streams(accrue: Accrue) -> None:
    accrue.serve()
    job_id = submit(accrue)  # no worker: nothing will end it
    with accrue.http.stream("GET", f"{TRAINING}/{job_id}/events", headers=STREAM) as answer:
        next(answer.iter_lines())
        accrue.processes[0].terminate()
        assert accrue.processes[0].wait(15) == -signal.SIGTERM
