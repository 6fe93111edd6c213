"""`make bench-dashboard`: load time of the first page and frame rate of a live one, with a large database.

The database has ten thousand jobs and ten million steps, as in `make bench-api`. A browser with an empty
cache opens each page; then it shows a job of a hundred thousand steps while twenty steps are added per
second. Needs a Chromium (`make test-browser` installs one). Writes results/dashboard.json.
"""

import argparse
import json
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.benchmarks.api import Bench, machine
from tests.harness.browser import chromium
from tests.harness.service import running

RESULTS = Path(__file__).parent / "results"
ROUNDS = 5
LIVE_STEPS = 100_000
STEPS_A_SECOND = 20

FRAMES = """seconds => new Promise((resolve) => {
  const times = [];
  const note = (now) => {
    times.push(now);
    if (now - times[0] < 1000 * seconds) requestAnimationFrame(note);
    else resolve(times.slice(1).map((time, place) => time - times[place]));
  };
  requestAnimationFrame(note);
})"""
"""Milliseconds from each frame to the next."""


def first_use(browser: Browser, url: str, address: str, shown: str) -> dict[str, Any]:
    """Seconds until a page shows its first useful content, in a browser with an empty cache."""
    seconds = []
    for _ in range(ROUNDS):
        context = browser.new_context()
        page = context.new_page()
        began = time.perf_counter()
        page.goto(f"{url}/#/{address}", wait_until="commit")
        page.locator(shown).first.wait_for()
        seconds.append(time.perf_counter() - began)
        context.close()
    return {"median_seconds": round(median(seconds), 3), "longest_seconds": round(max(seconds), 3)}


class LiveJob:
    """Simulates a running job: writes rows as a worker would."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path, self.job_id, self.step = path, job_id, LIVE_STEPS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DELETE FROM step_metrics WHERE job_id = ?", (job_id,))
            self._write(connection, 1, LIVE_STEPS)

    def __enter__(self) -> "LiveJob":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            while not self._stop.wait(1 / STEPS_A_SECOND):
                self._write(connection, self.step + 1, self.step + 1)
                self.step += 1

    def _write(self, connection: sqlite3.Connection, first: int, last: int) -> None:
        connection.execute(
            """WITH RECURSIVE counted(step) AS
                 (SELECT :first UNION ALL SELECT step + 1 FROM counted WHERE step < :last)
               INSERT INTO step_metrics
                 (job_id, step, attempt, micro_step, batch_idx, epoch, samples, loss, loss_ema,
                  gradient_accumulation_steps, effective_batch_size, physical_batch_size, learning_rate,
                  grad_norm, tokens, input_tokens, padded_tokens, tokens_per_second, memory_gb, peak_gb,
                  noise_scale, skipped, time, data_seconds, forward_backward_seconds, optimizer_seconds)
               SELECT :job, step, 1, step * 4, step * 4, 0, 32, 2 + 30.0 / step + abs(random() % 100) / 1e3,
                      2 + 30.0 / step, 4, 32, 8, 5e-5, 1 + abs(random() % 100) / 1e2, 3000, 3100, 3200,
                      9000 + random() % 500, 1.5, 1.7, 100.0 + step % 50, 0, 1.7e9 + step, 0.01, 0.3, 0.02
               FROM counted""",
            {"job": self.job_id, "first": first, "last": last},
        )
        progress = {
            "step": last, "steps_total": 2 * LIVE_STEPS, "loss": 2.0, "loss_ema": 2.0,
            "tokens_per_second": 9000.0, "memory_peak_bytes": 2**30, "eta_seconds": 5000.0,
        }  # fmt: skip
        connection.execute(
            "UPDATE jobs SET status = 'running', progress = ?, finished_at = NULL, result = NULL, "
            "started_at = coalesce(started_at, created_at) WHERE id = ?",
            (json.dumps(progress), self.job_id),
        )
        connection.commit()


def live(browser: Browser, url: str, job: LiveJob, seconds: float) -> dict[str, Any]:
    """Frame times while the page follows the job."""
    page = browser.new_page()
    page.goto(f"{url}/#/job/{job.job_id}")
    page.locator("figure .main-svg").first.wait_for()
    before = job.step
    with job:
        frames = sorted(page.evaluate(FRAMES, seconds))
    shown = page.get_by_text("Step ").first.inner_text()
    page.close()
    return {
        "steps": job.step,
        "steps_made_meanwhile": job.step - before,
        "shown": shown,
        "frames_per_second": round(len(frames) / seconds, 1),
        "p50_ms": round(frames[len(frames) // 2], 1),
        "p95_ms": round(frames[int(0.95 * len(frames))], 1),
        "p99_ms": round(frames[int(0.99 * len(frames))], 1),
        "longest_ms": round(frames[-1], 1),
        "share_over_50_ms": round(sum(each > 50 for each in frames) / len(frames), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000, help="steps of each job")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of the measurement of the live page"
    )
    requested = parser.parse_args()
    path = chromium()
    assert path is not None, "no Chromium here: make test-browser installs one"
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as accrue,
        sync_playwright() as playwright,
    ):
        accrue.serve()
        bench = Bench(accrue, requested.jobs, requested.steps, requested.seconds)
        bench.fill()
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        pages = {
            "plan": ("plan", ".verdict"),
            "jobs": ("jobs", "tbody tr"),
            "job, with its charts": (f"job/{bench.job_id(1)}", "figure .main-svg"),
            "gpus": ("gpus", "table, .muted"),
            "recommendations": ("recommendations", "tbody tr"),
        }
        for name, (address, shown) in pages.items():
            figures[name] = first_use(browser, accrue.url, address, shown)
            print(f"  {name}: {figures[name]}", flush=True)
        job = LiveJob(bench.path, bench.job_id(20))
        figures["live"] = live(browser, accrue.url, job, requested.seconds)
        print(f"  live: {figures['live']}", flush=True)
        told = {"machine": {**machine(), "browser": browser.version}, "jobs": requested.jobs, **figures}
        browser.close()
    told["steps"] = requested.jobs * requested.steps
    (RESULTS / "dashboard.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
