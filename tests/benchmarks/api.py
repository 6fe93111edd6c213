"""`make bench-api`: a real service and a load generator on the same cores, with a large database.

The database is SQLite with ten thousand jobs and ten million steps. The benchmark measures reads of one job
and of random jobs, their series, statistics and lists; submissions, each durable before it is acknowledged;
and 500 followers of 500 jobs, each of which must receive every event. It writes results/api.json.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
import uvloop

from app.jobs import events
from app.storage.database import Database
from app.storage.tables import Job
from tests.benchmarks.load import Load, get, post, send_requests
from tests.harness.service import TRAINING, Accrue, running

RESULTS = Path(__file__).parent / "results"
ROOT = "/gradient-accumulation"
FOLLOWERS = 500
EVENTS_EACH = 20

RESULT = {
    "files": ["model.safetensors"], "first_loss": 5.5, "final_loss": 2.6, "trained_tokens": 90_000,
    "effective_batch_size": 32,
}  # fmt: skip


class Bench:
    """A running service, and what was measured on it."""

    def __init__(self, accrue: Accrue, jobs: int, steps: int, seconds: float) -> None:
        self.accrue, self.jobs, self.steps, self.seconds = accrue, jobs, steps, seconds
        self.figures: dict[str, Any] = {}
        self.file_id = accrue.upload(b'{"text": "some text to learn"}\n' * 50)
        self.path = accrue.data / "accrue.db"

    def job_id(self, number: int) -> str:
        return f"ftjob-{number:026x}"

    def some_job(self) -> str:
        return self.job_id(random.randrange(self.jobs))

    def fill(self) -> None:
        """Inserts jobs with equally many steps: one in twenty is queued, the others have succeeded."""
        model = self.accrue.submit(dataset_config={"file_id": self.file_id}, target_effective_batch_size=32)
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            _copy_jobs(connection, model, self.jobs)
            _make_steps(connection, self.steps)
            connection.execute(
                "INSERT INTO job_totals (job_id, steps, samples, tokens, skipped, seconds, device_seconds, "
                "final_loss) SELECT job_id, count(*), sum(samples), sum(tokens), 0, "
                "sum(data_seconds + forward_backward_seconds + optimizer_seconds), 400.0, min(loss) "
                "FROM step_metrics GROUP BY job_id"
            )
            connection.commit()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def load(self, name: str, requests: Iterator[bytes], connections: int, expected: int = 200) -> Load:
        """Measures one kind of request. Every response must have the expected status."""
        send_requests(self.accrue.port, requests, connections, min(2.0, self.seconds))
        load = send_requests(self.accrue.port, requests, connections, self.seconds)
        assert set(load.statuses) == {expected}, load.statuses
        self.figures[name] = {
            "per_second": round(load.per_second, 1),
            "p50_ms": round(load.percentile_ms(0.5), 2),
            "p99_ms": round(load.percentile_ms(0.99), 2),
            "answers": len(load.latencies),
            "connections": connections,
        }
        print(f"  {name}: {self.figures[name]}", flush=True)
        return load

    def read(self) -> None:
        """Measures the most frequent reads."""
        self.load("job", repeat(get(f"{TRAINING}/{self.some_job()}")), 16)
        self.load("any job", _each(lambda: get(f"{TRAINING}/{self.some_job()}")), 16)
        series = _each(lambda: get(f"{TRAINING}/{self.some_job()}/metrics?points=500"))
        self.load("series of 500 points", series, 1)
        self.load("statistics of a job", _each(lambda: get(f"{ROOT}/stats/{self.some_job()}")), 1)
        self.load("statistics of the service", repeat(get(f"{ROOT}/stats")), 1)
        self.load("list of jobs", _each(lambda: get(f"{TRAINING}?after={self.some_job()}")), 1)

    def submit(self) -> None:
        """Measures submissions, and checks that every acknowledged job is stored."""
        body = {
            "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": self.file_id},
            "target_effective_batch_size": 32, "metadata": {"by": "bench"},
        }  # fmt: skip
        with closing(sqlite3.connect(self.path)) as connection:
            count = "SELECT count(*) FROM jobs"
            (before,) = connection.execute(count).fetchone()
            request = post(f"{TRAINING}/with-accumulation", json.dumps(body).encode())
            send_requests(self.accrue.port, repeat(request), 16, 2.0)
            (warm,) = connection.execute(count).fetchone()
            assert warm > before
            load = self.load("submit", repeat(request), 16, expected=202)
            (after,) = connection.execute(count).fetchone()
            assert after - warm >= len(load.latencies)

    def follow(self) -> None:
        """Measures event streams: each follower must receive all events of its job; the last event ends the
        job."""
        memory = psutil.Process(self.accrue.processes[0].pid).memory_info
        began = time.perf_counter()
        received = uvloop.run(self._follow())
        recorded = FOLLOWERS * EVENTS_EACH
        self.figures["followers"] = {
            "followers": FOLLOWERS,
            "events_recorded": recorded,
            "events_received": received,
            "seconds": round(time.perf_counter() - began, 1),
            "service_memory_mb": round(memory().rss / 1e6, 1),
        }
        print(f"  followers: {self.figures['followers']}", flush=True)
        assert received == recorded

    async def _follow(self) -> int:
        followed = [self.job_id(20 * number) for number in range(FOLLOWERS)]
        connected = asyncio.Barrier(FOLLOWERS + 1)
        following = [asyncio.create_task(self._events_of(job_id, connected)) for job_id in followed]
        await connected.wait()
        await asyncio.to_thread(self._record_events, followed)
        return sum(await asyncio.gather(*following))

    async def _events_of(self, job_id: str, connected: asyncio.Barrier) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.accrue.port)
        # Otherwise, the connection stays open when the stream has ended.
        headers = b"Accept: text/event-stream\r\nConnection: close\r\n\r\n"
        request = get(f"{TRAINING}/{job_id}/events")[:-2] + headers
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        await connected.wait()
        told = (await reader.read()).count(b"id: ftevent-")
        writer.close()
        return told

    def _record_events(self, followed: list[str]) -> None:
        database = Database(f"sqlite:///{self.path}")
        for number in range(EVENTS_EACH):
            last = number == EVENTS_EACH - 1
            kind = "cancelled" if last else "told"
            with database.writing() as session:
                for job_id in followed:
                    events.record_event_without_webhook(session, job_id, 0, kind, f"Event {number}.")
        database.close()


def _each(make: Callable[[], bytes]) -> Iterator[bytes]:
    while True:
        yield make()


def _copy_jobs(connection: sqlite3.Connection, model: str, count: int) -> None:
    names = [column.name for column in Job.__table__.columns]
    changed = {
        "id": "printf('ftjob-%026x', number)",
        "created_at": "created_at - number * 60.0",
        "status": "CASE WHEN number % 20 THEN 'succeeded' ELSE 'queued' END",
        "user_id": "number % 20",
        "started_at": "CASE WHEN number % 20 THEN created_at - number * 60.0 + 5 END",
        "finished_at": "CASE WHEN number % 20 THEN created_at - number * 60.0 + 65 END",
        "result": "CASE WHEN number % 20 THEN :result END",
        "place": "created_at - number * 60.0",
    }
    chosen = ", ".join(changed.get(name, name) for name in names)
    connection.execute(
        f"WITH RECURSIVE counted(number) AS "
        f"(SELECT 0 UNION ALL SELECT number + 1 FROM counted WHERE number + 1 < :count) "
        f"INSERT INTO jobs ({', '.join(names)}) SELECT {chosen} FROM jobs, counted WHERE id = :model",
        {"count": count, "model": model, "result": json.dumps(RESULT)},
    )
    connection.commit()


def _make_steps(connection: sqlite3.Connection, steps: int) -> None:
    """Inserts the steps of every job, with a falling loss."""
    connection.execute(
        """WITH RECURSIVE counted(step) AS
             (SELECT 1 UNION ALL SELECT step + 1 FROM counted WHERE step < :steps)
           INSERT INTO step_metrics
             (job_id, step, attempt, micro_step, batch_idx, epoch, samples, loss, loss_ema,
              gradient_accumulation_steps, effective_batch_size, physical_batch_size, learning_rate,
              grad_norm, tokens, input_tokens, padded_tokens, tokens_per_second, memory_gb, peak_gb,
              noise_scale, skipped, time, data_seconds, forward_backward_seconds, optimizer_seconds,
              aux_loss, largest_tokens, micro_losses, gradient_norms)
           SELECT id, step, 1, step * 4, step * 4, step / 100, 32, 2.0 + 3.0 / step, 2.0 + 3.0 / step,
                  4, 32, 8, 5e-5, 1.0 / step, 3000, 3100, 3200, 9000.0, 1.5, 1.7, NULL, 0,
                  1.7e9 + step, 0.01, 0.3, 0.02, NULL, 800, NULL, NULL
           FROM jobs, counted WHERE id LIKE 'ftjob-000000%' ORDER BY id, step""",
        {"steps": steps},
    )


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000, help="steps of each job")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    requested = parser.parse_args()
    assert requested.jobs >= 20 * FOLLOWERS, "followers need jobs that wait"
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as accrue:
        accrue.serve(ACCRUE_MAX_QUEUED_JOBS="1000000")
        bench = Bench(accrue, requested.jobs, requested.steps, requested.seconds)
        began = time.perf_counter()
        bench.fill()
        print(f"  filled in {time.perf_counter() - began:.0f} s", flush=True)
        bench.read()
        bench.follow()
        bench.submit()
    told = {
        "machine": machine(),
        "jobs": requested.jobs,
        "steps": requested.jobs * requested.steps,
        **bench.figures,
    }
    (RESULTS / "api.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
