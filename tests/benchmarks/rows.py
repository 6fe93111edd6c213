"""`make bench-data`: memory and time for a million samples, from the upload to the first step.

Uploads the same chats as JSON lines, CSV and Parquet to a service, and trains one step on the last of them.
Peak memory is the largest sum of resident memory (proportional shares) over a process and its children,
sampled ten times a second. Writes results/rows.md.
"""

import argparse
import csv
import json
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.harness.service import ENDED, TRAINING, Accrue, running

RESULTS = Path(__file__).parent / "results"
LIMIT_MIB = 1024


class Peak:
    """The largest memory of processes and all of their descendants, in MiB."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            self.mib = max(self.mib, sum(map(_resident_mib, [self._pid, *_descendants(self._pid)])))


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _resident_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def rows(count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        yield {
            "instruction": f"What is {number} plus {number % 97}?",
            "input": "",
            "output": f"It is {number + number % 97}.",
        }


def write(folder: Path, count: int) -> dict[str, Path]:
    """The same samples as files of three kinds, by kind."""
    paths = {kind: folder / f"million.{kind}" for kind in ("jsonl", "csv", "parquet")}
    with paths["jsonl"].open("w") as lines, paths["csv"].open("w", newline="") as cells:
        writer = csv.DictWriter(cells, ("instruction", "input", "output"))
        writer.writeheader()
        for row in rows(count):
            lines.write(json.dumps(row) + "\n")
            writer.writerow(row)
    pq.write_table(pa.Table.from_pylist(list(rows(count))), paths["parquet"], row_group_size=count)
    return paths


def upload(accrue: Accrue, service: int, path: Path) -> tuple[str, list[str]]:
    """The id of the uploaded file, and a row of the table."""
    began = time.monotonic()
    with Peak(service) as peak, path.open("rb") as content:
        answer = accrue.http.post(
            "/v1/files", files={"file": (path.name, content)}, data={"purpose": "fine-tune"}, timeout=None
        )
    answer.raise_for_status()
    file = answer.json()
    took, size = time.monotonic() - began, path.stat().st_size / 2**20
    what = f"upload of {path.suffix}, {size:.0f} MiB"
    return file["id"], [what, f"{file['examples']:,}", f"{took:.0f}", f"{peak.mib:.0f}"]


def train(accrue: Accrue, worker: int, file_id: str) -> tuple[list[str], list[int]]:
    """A row of the table, and the numbers of tokenised samples that the job showed."""
    job: dict[str, Any] = {
        "model_name": "accrue/tiny-gpt2",
        "dataset_config": {"file_id": file_id},
        "training_config": {"max_steps": 1},
        "target_effective_batch_size": 8,
    }
    began, shown = time.monotonic(), set()
    answer = accrue.http.post(f"{TRAINING}/with-accumulation", json=job).raise_for_status().json()
    with Peak(worker) as peak:
        while answer["status"] not in ENDED:
            time.sleep(0.5)
            answer = accrue.http.get(f"{TRAINING}/{answer['id']}").json()
            shown.add(answer["progress"]["prepared_samples"] or 0)
    assert answer["status"] == "succeeded", answer["error"]
    row = ["a job's preparation and one step", f"{answer['dataset']['examples']:,}"]
    return [*row, f"{time.monotonic() - began:.0f}", f"{peak.mib:.0f}"], sorted(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as accrue:
        accrue.serve()
        service, worker = accrue.processes[-1].pid, accrue.start("worker").pid
        made = [["what", "samples", "seconds", "peak MiB"], ["---", "---:", "---:", "---:"]]
        for path in write(Path(folder), count).values():
            file_id, row = upload(accrue, service, path)
            made.append(row)
            print(*row, sep=" | ", flush=True)
        row, shown = train(accrue, worker, file_id)
        made.append(row)
    text = "\n".join(f"| {' | '.join(row)} |" for row in made)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}. Peak "
        "memory is that of the service with its converter, and of the worker with its trainer (torch "
        "included). The "
        f"job showed {len(shown)} different numbers of tokenised samples, from {shown[0]:,} to {shown[-1]:,}."
    )
    print(text, about, sep="\n\n")
    (RESULTS / "rows.md").write_text(f"# {count:,} samples\n\n{text}\n\n{about}\n")
    too_much = [row for row in made[2:] if float(row[-1]) > LIMIT_MIB]
    assert not too_much, f"more than {LIMIT_MIB} MiB: {too_much}"


if __name__ == "__main__":
    main()
