"""A service and a worker as processes, with a data folder and a port of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.harness.runs import until
from workers.run_directory import RunDirectory

ENDED = ("succeeded", "failed", "cancelled")


TRAINING = "/gradient-accumulation/training"


class Accrue:
    """A service and any number of workers over one data folder."""

    def __init__(self, folder: Path, database_url: str | None = None) -> None:
        self.data = folder / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=90)
        self._log = (folder / "processes.log").open("wb")
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "ACCRUE_DATA_DIR": str(self.data),
            "ACCRUE_MODELS_DIR": str(folder / "models"),
            "ACCRUE_PORT": str(self.port),
            "ACCRUE_GPUS": "24GB,24GB,24GB,24GB",
            "ACCRUE_OFFLINE": "true",
            "ACCRUE_LEASE_SECONDS": "4",
            "ACCRUE_HEARTBEAT_SECONDS": "0.5",
            "ACCRUE_POLL_SECONDS": "0.1",
            "ACCRUE_CPU_THREADS": "1",
            "ACCRUE_PROFILER": "false",
            "ACCRUE_INFERENCE": "off",
        }
        if database_url is not None:
            self.env["ACCRUE_DATABASE_URL"] = database_url
        self.key: str | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def header(self) -> dict[str, str]:
        """The Authorization header, if there is a key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def start(self, part: str, **variables: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", part],
            env={**self.env, **variables}, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def serve(self, **variables: str) -> float:
        """Starts the service. Returns the seconds until it answered."""
        began = time.monotonic()
        self.start("serve", **variables)
        until(self.answers, 20)
        return time.monotonic() - began

    def answers(self) -> bool:
        try:
            return self.http.get("/healthz", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The accrue command against this service."""
        env = {**self.env, "ACCRUE_URL": self.url, "COLUMNS": "200"}
        command = [sys.executable, "-m", "app.cli", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.http.post(path, json=body) if body is not None else self.http.post(path)
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    def upload(self, content: bytes) -> str:
        answer = self.http.post(
            "/v1/files", files={"file": ("data.jsonl", content)}, data={"purpose": "fine-tune"}
        )
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    def submit(self, **body: Any) -> str:
        return str(
            self.post(f"{TRAINING}/with-accumulation", {"model_name": "accrue/tiny-gpt2", **body})["id"]
        )

    def job(self, job_id: str) -> Any:
        return self.get(f"{TRAINING}/{job_id}")

    def ended(self, job_id: str, seconds: float = 120) -> Any:
        """Waits until the job has ended, and returns it."""
        until(lambda: self.job(job_id)["status"] in ENDED, seconds)
        return self.job(job_id)

    def cancel_jobs(self) -> None:
        """Cancels all jobs, and waits until no trainer runs."""
        for job in self.get(f"{TRAINING}?limit=100")["data"]:
            if job["status"] not in ENDED:
                self.http.post(f"{TRAINING}/{job['id']}/cancel")
                self.ended(job["id"])

    def run(self, job_id: str) -> RunDirectory:
        return RunDirectory(self.data / "runs" / job_id)

    def trainer_of(self, job_id: str) -> int | None:
        """The process id of the job's trainer, from the process table: the innermost of the processes that
        contain it (process_tree.py)."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"workers.training" in words and any(word.endswith(job_id.encode()) for word in words):
                parents[int(entry.name)] = parent
        return next((pid for pid in parents if pid not in parents.values()), None)

    def steps_logged(self, job_id: str) -> int:
        path = self.run(job_id).metrics
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.http.close()
        self._log.close()


@contextmanager
def running(folder: Path, database_url: str | None = None) -> Iterator[Accrue]:
    accrue = Accrue(folder, database_url)
    try:
        yield accrue
    finally:
        accrue.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
