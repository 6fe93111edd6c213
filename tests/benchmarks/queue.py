"""`make bench-queue`: claims per second over four processes, and log lines stored per second.

It uses SQLite or, with --postgresql, a PostgreSQL server that it starts. As in a worker, every claim is its
own durable transaction; the benchmark checks that each job is claimed only once. Log lines are stored by the
worker's code, from a file in the trainer's format. The figures are medians of several rounds. Writes
results/queue.json.
"""

import argparse
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from app.jobs import queue
from app.storage.database import Database
from app.storage.migrations import migrate
from app.storage.tables import Job
from tests.harness.log_lines import line
from tests.harness.postgresql import Server
from tests.harness.runs import create_run
from tests.harness.submissions import submitted
from workers.ingest import Position, ingest

RESULTS = Path(__file__).parent / "results"
PROCESSES = 4


def fill(database: Database, count: int) -> None:
    """Inserts `count` identical queued jobs."""
    first = submitted(database)
    with database.writing() as session:
        row = session.get_one(Job, first)
        fields = {column.key: getattr(row, column.key) for column in Job.__table__.columns}
        rows = [fields | {"id": f"ftjob-{number:08d}", "place": float(number)} for number in range(count - 1)]
        session.execute(insert(Job), rows)


def claim_all(arguments: tuple[str, int]) -> list[str]:
    """Claims until nothing is left."""
    url, number = arguments
    database = Database(url)
    claimed = []
    while True:
        with database.writing() as session:
            fence = queue.claim(session, f"worker-{number}", 600.0)
        if fence is None:
            return claimed
        claimed.append(fence.job_id)


def claims_per_second(url: str, count: int) -> float:
    """Claims per second of four concurrent processes; checks that every job is claimed once."""
    database = Database(url)
    fill(database, count)
    with ProcessPoolExecutor(PROCESSES) as pool:
        list(pool.map(_warm, range(PROCESSES)))
        began = time.perf_counter()
        found = [
            job_id for own in pool.map(claim_all, [(url, n) for n in range(PROCESSES)]) for job_id in own
        ]
        seconds = time.perf_counter() - began
    assert len(found) == len(set(found)) == count, "a job was claimed twice, or lost"
    database.close()
    return count / seconds


def _warm(number: int) -> None:
    time.sleep(0.5)


def lines_per_second(url: str, folder: Path, count: int) -> float:
    """Log lines per second from a job's file to rows, in chunks of a worker's size."""
    database = Database(url)
    submitted(database)
    with database.writing() as session:
        fence = queue.claim(session, "worker-1", 600.0)
        assert fence is not None
    run = create_run(folder / "run")
    with run.metrics.open("w") as file:
        for step in range(1, count + 1):
            file.write(line(step).model_dump_json() + "\n")
    began, position = time.perf_counter(), Position(caught_up=False)
    while not position.caught_up:  # in as many transactions as a worker takes
        with database.writing() as session:
            position = ingest(session, run, fence, position)
    seconds = time.perf_counter() - began
    with database.reading() as session:
        (progress,) = session.scalars(select(Job.progress).where(Job.id == fence.job_id))
    assert progress["step"] == count
    database.close()
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--postgresql", action="store_true", help="on a server of its own, for comparison")
    requested = parser.parse_args()
    claims, lines = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = Server(Path(folder) / "server") if requested.postgresql else None
        if server:
            stack.callback(server.stop)
        for number in range(requested.rounds):
            own = Path(folder) / str(number)
            own.mkdir()
            url = server.new_database() if server else f"sqlite:///{own / 'bench.db'}"
            migrate(url)
            claims.append(round(claims_per_second(url, requested.jobs)))
            lines.append(round(lines_per_second(url, own, requested.lines)))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "database": f"SQLite {sqlite3.sqlite_version}" if server is None else "PostgreSQL",
        "claims_per_second": statistics.median(claims),
        "lines_per_second": statistics.median(lines),
        "rounds": {"claims_per_second": claims, "lines_per_second": lines},
    }
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    name = "queue.json" if server is None else "queue_postgresql.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
