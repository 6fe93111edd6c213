"""Renews and enforces leases in threads of their own, so that no slow operation delays them.

A trainer must be gone before another worker may take its job up. So one thread only looks at the clock,
and another only speaks to the database, over a connection of its own that loses patience early.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.contract.reports import Failure
from app.contract.states import RequestedAction
from app.devices import live_workers
from app.errors import ReplacedDatabase
from app.jobs import queue
from app.jobs.transitions import Fence, LostJob
from app.planning.devices import Device
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Worker
from workers.ingest import Position
from workers.run_directory import RunDirectory
from workers.trainer_process import TrainerProcess

log = structlog.get_logger("accrue.worker")

SILENT_SECONDS = 24 * 3600.0
"""A worker that was silent this long is forgotten."""

_BEFORE_THE_LEASE_ENDS = 1.0
"""Seconds in which a trainer that is killed is surely gone."""

_LOOKED_AT_EVERY = 0.2


@dataclass
class Running:
    """A trainer at work. Times are of the monotonic clock, in seconds."""

    fence: Fence
    device: Device
    trainer: TrainerProcess
    run: RunDirectory
    lease_ends: float
    times_out: float | None
    position: Position = field(default_factory=Position)
    heard_at: float = field(default_factory=time.monotonic)
    """When it was last looked at whether it had written anything."""
    heard_bytes: int = 0
    """What it had written by then."""
    requested: RequestedAction | None = None
    """What people want of the job, as of the last renewal."""
    stopping: str | None = None
    """Why the trainer is to stop."""
    timed_out: bool = False
    stuck: bool = False
    """It was ended since it made no progress."""
    broken: Failure | None = None
    """An unexpected error of the worker about this job, which counts as a crash; its reports are ignored."""
    failed_device: bool | None = None
    """Whether the trainer's device does not work any more; None: nobody has reported that, or not checked."""
    lost: bool = False
    """The job belongs to another worker, or may do so: the trainer was killed."""


class LeaseKeeper:
    """Sends the heartbeat, renews the leases, and kills trainers whose lease it could not renew.

    Args:
        running: what the supervisor runs at the moment.
        devices: of this machine.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        running: Callable[[], list[Running]],
        devices: Callable[[], list[Device]],
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._running = running
        self._devices = devices
        self._started_at = time.time()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Both threads, until the end of the block."""
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("leases", self._beat_on), ("deadlines", self._enforce_on))
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join(self._settings.lease_seconds)

    def beat(self, database: Database) -> None:
        """One round: every lease, the worker's own sign of life, and the return of lost jobs to the queue.

        Its own leases come first: should the clock have jumped ahead, they are not lost.
        """
        for running in self._running():
            if not running.lost:
                self._renew(database, running)
        with database.writing() as session:
            live_workers.beat(session, self._row())
            live_workers.forget(session, [], SILENT_SECONDS)
        with database.writing() as session:
            for job_id in queue.reclaim_expired(session):
                log.warning("job rescued from a lost worker", job=job_id)

    def enforce(self) -> None:
        """Kills trainers that would outlive their lease, and those that did not stop in time."""
        for running in self._running():
            if running.trainer.status() is not None:
                continue
            if time.monotonic() > running.lease_ends - _BEFORE_THE_LEASE_ENDS:
                running.lost = True
                running.trainer.kill()
            elif running.trainer.overdue:
                running.trainer.kill()
            else:
                running.trainer.sign_of_life()

    def _beat_on(self) -> None:
        patience = self._settings.lease_seconds / 3
        database = Database(self._settings.resolved_database_url, timeout_seconds=patience)
        while not self._stopped.is_set():
            try:
                self.beat(database)
            except (SQLAlchemyError, ReplacedDatabase) as error:
                log.warning("the database did not answer", error=str(error).splitlines()[0])
            except Exception:
                log.exception("a round of leases failed")  # the next one may not: this thread must go on
            self._stopped.wait(self._settings.heartbeat_seconds)
        database.close()

    def _enforce_on(self) -> None:
        while not self._stopped.wait(_LOOKED_AT_EVERY):
            try:
                self.enforce()
            except Exception:
                log.exception("a look at the deadlines failed")

    def _renew(self, database: Database, running: Running) -> None:
        asked_at = time.monotonic()
        try:
            with database.writing() as session:
                requested = queue.heartbeat(session, running.fence, self._settings.lease_seconds)
        except LostJob:
            running.lost = True
            return
        running.requested = requested
        running.lease_ends = asked_at + self._settings.lease_seconds

    def _row(self) -> Worker:
        return Worker(
            id=self._worker_id,
            hostname=socket.gethostname(),
            started_at=self._started_at,
            heartbeat_at=0.0,
            devices=[asdict(device) for device in self._devices()],
            running=[running.fence.job_id for running in self._running()],
        )
