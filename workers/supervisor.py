"""One process per machine: claims jobs for free devices, runs a trainer for each, watches, finishes.

The loop is a single thread, so that the parent-death signal of its trainers means its own death. Each
turn does a little of everything: leases, claims, news from the trainers, ended trainers.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import OperationalError

from app import gpus, jobs, workers_seen
from app.database import Database
from app.ids import new_id
from app.jobs import Fence, LostJob
from app.models import Job, Worker
from app.planning.devices import Device
from app.planning.plan import make_plan
from app.schemas.run import Failure
from app.schemas.spec import Order, Spec
from app.settings import Settings
from workers.ingest import Ingest
from workers.run_directory import INTERRUPTED, LIFELINE_VARIABLE, RunDirectory

log = structlog.get_logger("accrue.worker")

_PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "SSL_CERT_FILE",
    "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY",
)  # fmt: skip
_PASSED_ON_PREFIXES = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "NCCL_", "OMP_", "MKL_")


@dataclass
class Running:
    """A trainer at work. Times are of the monotonic clock, in seconds."""

    fence: Fence
    device: Device
    process: subprocess.Popen[bytes]
    lifeline: int
    """Our end of the pipe whose closing ends the trainer."""
    run: RunDirectory
    ingest: Ingest
    lease_ends: float
    deadline: float | None
    stopping: str | None = None
    kill_at: float | None = None


@dataclass
class Supervisor:
    """Runs until `stop()`, and gives every job back before it returns."""

    settings: Settings
    database: Database
    id: str = field(default_factory=lambda: new_id("worker"))
    running: list[Running] = field(default_factory=list)
    stopped: bool = False
    started_at: float = field(default_factory=time.time)
    _next_beat: float = 0.0

    def run(self) -> None:
        """Turns until stopped; then stops the trainers, and gives their jobs back."""
        log.info("worker started", worker=self.id, devices=[device.name for device in self.devices()])
        while not self.stopped:
            with self._database_may_be_away():
                self.turn()
            time.sleep(self.settings.poll_seconds)
        self._shut_down()
        log.info("worker stopped", worker=self.id)

    def stop(self, *_: Any) -> None:
        """Ends the run at the next turn: the handler of SIGTERM and SIGINT."""
        self.stopped = True

    def turn(self) -> None:
        """One look at everything."""
        if time.monotonic() >= self._next_beat:
            self._beat()
            self._next_beat = time.monotonic() + self.settings.heartbeat_seconds
        for trainer in list(self.running):
            self._attend(trainer)
        for device in self.free_devices():
            if not self._claim(device):
                break

    def devices(self) -> list[Device]:
        """A slot for each GPU; the CPU, where there is none."""
        return [gpu.device for gpu in gpus.seen()] or [gpus.this_cpu()]

    def free_devices(self) -> list[Device]:
        taken = {trainer.device.id for trainer in self.running}
        return [device for device in self.devices() if device.id not in taken]

    def _beat(self) -> None:
        """Says that the worker lives, renews its leases, and takes back what lost workers held."""
        with self.database.writing() as session:
            workers_seen.beat(session, self._row())
            workers_seen.forget(session, [], silent_seconds=24 * 3600)
            for job_id in jobs.rescue(session):
                log.warning("job rescued from a lost worker", job=job_id)
        for trainer in list(self.running):
            self._renew(trainer)

    def _row(self) -> Worker:
        return Worker(
            id=self.id,
            hostname=socket.gethostname(),
            started_at=self.started_at,
            heartbeat_at=0.0,
            devices=[asdict(device) for device in self.devices()],
            running=[trainer.fence.job_id for trainer in self.running],
        )

    def _renew(self, trainer: Running) -> None:
        asked_at = time.monotonic()
        try:
            with self.database.writing() as session:
                requested = jobs.heartbeat(session, trainer.fence, self.settings.lease_seconds)
        except LostJob:
            self._lose(trainer)
            return
        trainer.lease_ends = asked_at + self.settings.lease_seconds
        if requested and not trainer.stopping:
            self._ask_to_stop(trainer, "paused" if requested == "pause" else "cancelled")

    def _claim(self, device: Device) -> bool:
        asked_at = time.monotonic()
        with self.database.writing() as session:
            job = jobs.claim(session, self.id, self.settings.lease_seconds)
        if job is None:
            return False
        fence = Fence(job.id, job.attempt, self.id)
        try:
            order = self._order(job, device)
            with self.database.writing() as session:
                jobs.store_plan(session, fence, order.plan, _name(device))
            self.running.append(self._launch(fence, order, device, asked_at))
        except (OSError, ValueError) as error:
            log.exception("the trainer could not be started", job=job.id)
            failure = Failure(code="not_started", message=_not_started(error), permanent=False)
            with self.database.writing() as session:
                jobs.crash(session, fence, failure)
        return True

    def _order(self, job: Job, device: Device) -> Order:
        spec = Spec.model_validate(job.spec)
        threads = (self.settings.cpu_threads or gpus.cpu_threads()) if device.kind == "cpu" else None
        plan = make_plan(spec, [device], predicted=False, threads=threads)
        return Order(
            job_id=job.id,
            attempt=job.attempt,
            spec=spec,
            plan=plan,
            data_file=str(self.settings.files_dir / spec.data.file_id),
            model_path=self._model_path(spec),
        )

    def _model_path(self, spec: Spec) -> str:
        if spec.model.source == "built_in":
            return str(self.settings.made_models_dir / spec.model.name)
        if spec.model.source == "local":
            if self.settings.models_dir is None:
                raise ValueError("ACCRUE_MODELS_DIR is not set for the worker")
            return str(self.settings.models_dir.absolute() / spec.model.name)
        return spec.model.name

    def _launch(self, fence: Fence, order: Order, device: Device, asked_at: float) -> Running:
        run = RunDirectory(self.settings.runs_dir / fence.job_id)
        run.write_order(order)
        theirs, ours = os.pipe()
        try:
            with run.log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "workers.training", str(run.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(device, theirs),
                    pass_fds=[theirs],
                    start_new_session=True,
                    cwd=Path(__file__).resolve().parent.parent,
                )
        finally:
            os.close(theirs)
        log.info("trainer started", job=fence.job_id, attempt=fence.attempt, pid=process.pid)
        timeout = order.spec.timeout_seconds
        return Running(
            fence=fence,
            device=device,
            process=process,
            lifeline=ours,
            run=run,
            ingest=Ingest(run, fence),
            lease_ends=asked_at + self.settings.lease_seconds,
            deadline=time.monotonic() + timeout if timeout else None,
        )

    def _attend(self, trainer: Running) -> None:
        """News, an end, a deadline: whatever there is of one trainer."""
        now = time.monotonic()
        ended = trainer.process.poll() is not None
        if now > trainer.lease_ends - 1.0 and not ended:
            self._lose(trainer)
            return
        try:
            with self.database.writing() as session:
                while trainer.ingest.read(session):
                    pass
                if ended:
                    self._finish(session, trainer)
        except LostJob:
            self._lose(trainer)
            return
        if ended:
            self._forget(trainer)
        elif trainer.kill_at is not None and now > trainer.kill_at:
            _kill(trainer.process)
        elif trainer.deadline is not None and now > trainer.deadline and not trainer.stopping:
            self._ask_to_stop(trainer, "timeout")

    def _finish(self, session: Any, trainer: Running) -> None:
        """Turns the trainer's end into the job's."""
        status, fence = trainer.process.returncode, trainer.fence
        outcome = trainer.run.outcome() if status == 0 else None
        failure = trainer.run.failure()
        log.info("trainer ended", job=fence.job_id, attempt=fence.attempt, status=status)
        if outcome is not None:
            jobs.succeed(session, fence, outcome.model_dump(mode="json"))
        elif trainer.stopping == "timeout":
            jobs.fail(session, fence, Failure(
                code="timeout", message="The job ran longer than its timeout_seconds.", permanent=True,
            ))  # fmt: skip
        elif status == INTERRUPTED or trainer.stopping:
            jobs.release(session, fence, trainer.stopping or "interrupted")
        elif failure is not None and failure.permanent:
            jobs.fail(session, fence, failure)
        else:
            jobs.crash(session, fence, failure or _died(status))

    def _ask_to_stop(self, trainer: Running, why: str) -> None:
        """SIGTERM now, SIGKILL after the grace."""
        trainer.stopping = why
        trainer.kill_at = time.monotonic() + self.settings.stop_grace_seconds
        with contextlib.suppress(ProcessLookupError):
            trainer.process.send_signal(signal.SIGTERM)

    def _lose(self, trainer: Running) -> None:
        """The job is another's by now, or will be: its trainer must be gone before."""
        log.warning("lost the job", job=trainer.fence.job_id, attempt=trainer.fence.attempt)
        _kill(trainer.process)
        self._forget(trainer)

    def _forget(self, trainer: Running) -> None:
        trainer.process.wait()
        os.close(trainer.lifeline)
        self.running.remove(trainer)

    def _shut_down(self) -> None:
        for trainer in self.running:
            if not trainer.stopping:
                self._ask_to_stop(trainer, "the worker was shut down")
        while self.running:
            with self._database_may_be_away():
                if time.monotonic() >= self._next_beat:
                    self._beat()
                    self._next_beat = time.monotonic() + self.settings.heartbeat_seconds
                for trainer in list(self.running):
                    self._attend(trainer)
            time.sleep(min(0.1, self.settings.poll_seconds))
        with self._database_may_be_away(), self.database.writing() as session:
            workers_seen.forget(session, [self.id], silent_seconds=24 * 3600)

    @contextlib.contextmanager
    def _database_may_be_away(self) -> Iterator[None]:
        """A database that does not answer is asked again at the next turn; leases decide meanwhile."""
        try:
            yield
        except OperationalError as error:
            log.warning("the database did not answer", error=str(error.orig))


def _name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"cuda:{device.id}"


def _environment(device: Device, lifeline: int) -> dict[str, str]:
    """What a trainer needs of our environment, and none of our secrets."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return {
        **passed,
        LIFELINE_VARIABLE: str(lifeline),
        "CUDA_VISIBLE_DEVICES": "" if device.kind == "cpu" else str(device.id),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's order, by which we number GPUs
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the trainer and its own children: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _not_started(error: OSError | ValueError) -> str:
    """A system's error may name paths: those stay in the worker's log."""
    what = type(error).__name__ if isinstance(error, OSError) else str(error).splitlines()[0]
    return f"the trainer could not be started: {what}"


def _died(status: int) -> Failure:
    if status < 0:
        name = signal.Signals(-status).name
        hint = " (often the machine running out of memory)" if name == "SIGKILL" else ""
        return Failure(
            code="trainer_killed", message=f"the trainer was ended by {name}{hint}", permanent=False
        )
    return Failure(code="trainer_crashed", message=f"the trainer ended with status {status}", permanent=False)
