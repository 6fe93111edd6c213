"""`make bench-fleet`: a hundred workers on one PostgreSQL database with ten thousand queued jobs.

First, the workers claim jobs as fast as they can; each job must be claimed once. Then they behave as workers
do: each looks for a job twice a second, holds it for some seconds, renews its lease and its heartbeat, and
ends it, while clients send requests to a real service on the same database. The workers are threads in four
processes; everything shares this machine's cores. Writes results/fleet.json.
"""

import argparse
import itertools
import json
import os
import platform
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select

from app.devices import live_workers
from app.jobs import queue
from app.storage.database import Database
from app.storage.tables import Job, Worker
from tests.benchmarks.api import RESULT
from tests.benchmarks.load import get, post, send_requests
from tests.benchmarks.queue import fill
from tests.harness.postgresql import Server
from tests.harness.service import TRAINING, running

RESULTS = Path(__file__).parent / "results"
PROCESSES = 4
LOOK_SECONDS, HEARTBEAT_SECONDS, LEASE_SECONDS = 0.5, 3.0, 15.0
TRAINING_SECONDS = (5.0, 25.0)


def in_threads(count: int, work: Any) -> list[Any]:
    """What `work` returns in each of some threads, given the thread's number."""
    found: list[Any] = [None] * count

    def run(number: int) -> None:
        found[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def claim_all(arguments: tuple[str, int, int]) -> list[str]:
    """Claims in some threads until nothing is left. Returns the claimed jobs."""
    url, process, workers = arguments
    database = Database(url)

    def claim(number: int) -> list[str]:
        claimed = []
        while True:
            with database.writing() as session:
                fence = queue.claim(session, f"worker-{process}-{number}", 600.0)
            if fence is None:
                return claimed
            claimed.append(fence.job_id)

    return list(itertools.chain(*in_threads(workers, claim)))


def work(arguments: tuple[str, int, int, float]) -> list[float]:
    """Behaves as some workers do, for some seconds. Returns how long each look at the queue took."""
    url, process, workers, seconds = arguments
    database = Database(url)
    ends = time.monotonic() + seconds

    def as_worker(number: int) -> list[float]:
        name, chance = f"worker-{process}-{number}", random.Random(1000 * process + number)
        time.sleep(chance.uniform(0, HEARTBEAT_SECONDS))
        fence, looks, beat_at, done_at = None, [], 0.0, 0.0
        while (now := time.monotonic()) < ends:
            if now > beat_at + HEARTBEAT_SECONDS:
                beat_at = now
                with database.writing() as session:
                    live_workers.beat(session, row_of(name, fence.job_id if fence else None))
                if fence is not None:
                    with database.writing() as session:
                        queue.renew_lease(session, fence, LEASE_SECONDS)
            if fence is None:
                began = time.perf_counter()
                with database.writing() as session:
                    fence = queue.claim(session, name, LEASE_SECONDS)
                looks.append(time.perf_counter() - began)
                done_at = now + chance.uniform(*TRAINING_SECONDS)
            elif now > done_at:
                with database.writing() as session:
                    queue.succeed(session, fence, RESULT)
                fence = None
                continue
            time.sleep(LOOK_SECONDS)
        return looks

    return list(itertools.chain(*in_threads(workers, as_worker)))


def row_of(name: str, job_id: str | None) -> Worker:
    return Worker(id=name, hostname=name, started_at=0.0, heartbeat_at=0.0, labels={},
                  devices=[{"id": "cpu", "name": "CPU", "memory_bytes": 2**34, "kind": "cpu"}],
                  running=[job_id] if job_id else [])  # fmt: skip


def copies(database: Database, job_id: str, count: int) -> list[str]:
    """Makes copies of a queued job. Returns their ids."""
    with database.writing() as session:
        row = session.get_one(Job, job_id)
        fields = {column.key: getattr(row, column.key) for column in Job.__table__.columns}
        ids = [f"ftjob-{number:026x}" for number in range(count - 1)]
        rows = [fields | {"id": own, "place": float(number)} for number, own in enumerate(ids)]
        session.execute(insert(Job), rows)
    return ids


def requests(file_id: str, known: list[str]) -> Iterator[bytes]:
    """What clients send: reads of single jobs above all, lists, and submissions."""
    body = {
        "model_name": "accrue/tiny-gpt2", "dataset_config": {"file_id": file_id},
        "target_effective_batch_size": 32,
    }  # fmt: skip
    submission = post(f"{TRAINING}/with-accumulation", json.dumps(body).encode())
    chance = random.Random(0)
    while True:
        drawn = chance.random()
        if drawn < 0.1:
            yield submission
        elif drawn < 0.2:
            yield get(f"{TRAINING}?limit=20")
        else:
            yield get(f"{TRAINING}/{chance.choice(known)}")


def measure(jobs: int, workers: int, seconds: float, folder: Path) -> dict[str, Any]:
    server = Server(folder / "server")
    try:
        server._run("ALTER SYSTEM SET max_connections = 400")
        server.restart()
        each = workers // PROCESSES
        url = server.new_database()
        database = Database(url)
        fill(database, jobs)
        with ProcessPoolExecutor(PROCESSES) as pool:
            began = time.perf_counter()
            found = list(itertools.chain(*pool.map(claim_all, [(url, n, each) for n in range(PROCESSES)])))
            claims = len(found) / (time.perf_counter() - began)
        assert len(found) == len(set(found)) == jobs, "a job was claimed twice, or lost"
        database.close()

        url = server.new_database()
        database = Database(url)
        (folder / "service").mkdir()
        with running(folder / "service", url) as accrue, ProcessPoolExecutor(PROCESSES) as pool:
            accrue.env |= {"ACCRUE_MAX_QUEUED_JOBS": "1000000", "ACCRUE_LOG_LEVEL": "WARNING"}
            accrue.serve()
            file_id = accrue.upload(b'{"text": "some text to learn"}\n' * 50)
            known = copies(database, accrue.submit(dataset_config={"file_id": file_id}), jobs)
            working = [pool.submit(work, (url, n, each, seconds + 15)) for n in range(PROCESSES)]
            time.sleep(10)
            load = send_requests(accrue.port, requests(file_id, known), 4, seconds)
            looks = sorted(itertools.chain(*(each.result() for each in working)))
        log = (folder / "service" / "processes.log").read_text()
        assert set(load.statuses) <= {200, 202}, f"{load.statuses}\n{log[-3000:]}"
        with database.reading() as session:
            ended = session.scalar(select(func.count()).where(Job.status == "succeeded"))
            twice = session.scalar(select(func.count()).where(Job.attempt > 1))
        assert twice == 0, "a lease ran out"
        return {
            "jobs": jobs,
            "workers": workers,
            "claims_per_second": round(claims),
            "with_clients": {
                "requests_per_second": round(load.per_second),
                "p50_ms": round(load.percentile_ms(0.5), 1),
                "p99_ms": round(load.percentile_ms(0.99), 1),
                "look_p50_ms": round(1000 * looks[len(looks) // 2], 1),
                "look_p99_ms": round(1000 * looks[int(0.99 * len(looks))], 1),
                "jobs_ended": ended,
            },
        }
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    requested = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(requested.jobs, requested.workers, requested.seconds, Path(folder))
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "database": "PostgreSQL",
    } | found
    print(json.dumps(result, indent=1))
    (RESULTS / "fleet.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
