"""`make soak`: runs small jobs under random faults for an hour; checks for lost or repeated jobs and for
leaks.

One service and one worker run for the whole time; the test records their resident memory and open handles
every minute. Faults hit everything else: trainers are killed or suspended; a second worker is killed,
suspended past its lease and restarted; jobs are paused, resumed and cancelled. Writes results/soak.json.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.harness.runs import until
from tests.harness.service import ENDED, TRAINING, Accrue, running

RESULTS = Path(__file__).parent / "results"
AT_ONCE = 6
"""The number of jobs that are queued or running at any time."""
WARM_SECONDS = 120.0
LOOKS, LOOK_EVERY_SECONDS = 40, 0.1


class Soak:
    """The service with its workers, the jobs that it acknowledged, and what was done to them."""

    def __init__(self, accrue: Accrue) -> None:
        self.accrue = accrue
        self.jobs: list[str] = []
        self.open: set[str] = set()
        self.done: Counter[str] = Counter()
        accrue.serve()
        self.service = accrue.processes[-1]
        self.worker = accrue.start("worker")
        self.victim = accrue.start("worker")

    def submit(self) -> None:
        texts = ["some text to learn " * random.randint(1, 4) for _ in range(12)]
        body = {
            "dataset_config": {"texts": texts, "max_length": 64},
            "training_config": {"max_steps": random.randint(3, 12), "save_every": 3},
            "target_effective_batch_size": 8,
        }
        job_id = self.accrue.submit(**body)
        self.jobs.append(job_id)
        self.open.add(job_id)

    def kill_trainer(self) -> None:
        self._signal_trainer(signal.SIGKILL)

    def suspend_trainer(self) -> None:
        pid = self._signal_trainer(signal.SIGSTOP)
        time.sleep(random.uniform(0.5, 3))
        if pid is not None:
            _signal(pid, signal.SIGCONT)

    def kill_worker(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self.accrue.processes.remove(self.victim)
        self.victim = self.accrue.start("worker")

    def suspend_worker_past_its_lease(self) -> None:
        self.victim.send_signal(signal.SIGSTOP)
        time.sleep(random.uniform(4, 7))
        self.victim.send_signal(signal.SIGCONT)

    def terminate_worker(self) -> None:
        self.victim.send_signal(signal.SIGTERM)
        self.victim.wait(60)
        self.accrue.processes.remove(self.victim)
        self.victim = self.accrue.start("worker")

    def pause_and_resume(self) -> None:
        job_id = self._any_open()
        if job_id and self.accrue.http.post(f"{TRAINING}/{job_id}/pause").is_success:
            time.sleep(random.uniform(0, 2))
            self.accrue.http.post(f"{TRAINING}/{job_id}/resume")

    def cancel(self) -> None:
        if (job_id := self._any_open()) is not None:
            self.accrue.http.post(f"{TRAINING}/{job_id}/cancel")

    def refresh(self) -> None:
        """Drops ended jobs from the open ones, and resumes jobs whose pause took effect after their
        resume."""
        for job_id in list(self.open):
            status = self.accrue.job(job_id)["status"]
            if status in ENDED:
                self.open.remove(job_id)
            elif status == "paused":
                self.accrue.http.post(f"{TRAINING}/{job_id}/resume")

    def _any_open(self) -> str | None:
        return random.choice(sorted(self.open)) if self.open else None

    def _signal_trainer(self, number: int) -> int | None:
        for job_id in random.sample(sorted(self.open), len(self.open)):
            pid = self.accrue.trainer_of(job_id)
            if pid is not None and _signal(pid, number):
                return pid
        return None


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def usage(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Resident bytes and open handles of a process: the fewest of some looks, since what a running trainer
    takes is no growth."""
    looks = []
    for _ in range(LOOKS):
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        handles = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        looks.append((int(resident.split()[1]) * 1024, handles))
        time.sleep(LOOK_EVERY_SECONDS)
    return {"resident_bytes": min(bytes for bytes, _ in looks), "handles": min(count for _, count in looks)}


def soak(soak: Soak, seconds: float) -> list[dict[str, Any]]:
    """Submits jobs and injects faults for some seconds. Returns the resource usage of each minute."""
    faults: list[Callable[[], None]] = [
        soak.kill_trainer, soak.kill_trainer, soak.suspend_trainer, soak.kill_worker,
        soak.suspend_worker_past_its_lease, soak.terminate_worker, soak.pause_and_resume, soak.cancel,
    ]  # fmt: skip
    began, used, next_look = time.monotonic(), [], WARM_SECONDS
    while (passed := time.monotonic() - began) < seconds:
        while len(soak.open) < AT_ONCE:
            soak.submit()
        fault = random.choice(faults)
        fault()
        soak.done[fault.__name__] += 1
        soak.refresh()
        if passed >= next_look:
            next_look += 60
            used.append(
                {"seconds": round(passed), "service": usage(soak.service), "worker": usage(soak.worker)}
            )
            print(
                f"{passed / 60:5.1f} min: {len(soak.jobs)} jobs, {soak.done.total()} faults, {used[-1]}",
                flush=True,
            )
        time.sleep(random.uniform(0, 1.5))
    return used


def check_results(soak: Soak) -> dict[str, int]:
    """Counts lost jobs, and jobs with several ends or a log in which attempts alternate."""
    until(lambda: soak.refresh() is None and not soak.open, 600)  # type: ignore[func-returns-value]
    ends: Counter[str] = Counter()
    lost = doubled = 0
    for job_id in soak.jobs:
        answer = soak.accrue.http.get(f"{TRAINING}/{job_id}")
        if answer.status_code != httpx.codes.OK:
            lost += 1
            continue
        ends[answer.json()["status"]] += 1
        events = soak.accrue.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]
        told = sum(event["type"] in ENDED for event in events)
        log = soak.accrue.run(job_id).metrics
        lines = log.read_bytes().splitlines() if log.exists() else []
        attempts = [
            json.loads(line)["attempt"] for line in lines if line.startswith(b"{") and line.endswith(b"}")
        ]
        doubled += told != 1 or any(before > after for before, after in pairwise(attempts))
    return {"jobs": len(soak.jobs), "lost": lost, "doubled": doubled, **ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=7)
    requested = parser.parse_args()
    random.seed(requested.seed)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as accrue:
        own = Soak(accrue)
        used = soak(own, 60 * requested.minutes)
        result: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(), "minutes": requested.minutes,
            "faults": dict(own.done), **check_results(own), "used": used,
        }  # fmt: skip
    growth = {
        f"{part}_{what}": used[-1][part][what] / used[0][part][what] - 1
        for part in ("service", "worker")
        for what in ("resident_bytes", "handles")
    }
    result["growth"] = growth
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "used"}, indent=1))
    if result["lost"] or result["doubled"] or any(share > 0.05 for share in growth.values()):
        raise SystemExit("a job was lost or doubled, or resource usage grew")


if __name__ == "__main__":
    main()
