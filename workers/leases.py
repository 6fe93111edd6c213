"""Renews and enforces leases in threads of their own, so that no slow operation delays them.

A trainer must have ended before another worker may claim its job. So one thread only watches the clock, and
another only accesses the database, over its own connection with a short timeout.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

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
from workers.run_upload import RunUpload

log = structlog.get_logger("accrue.worker")

DELETE_WORKER_AFTER_SECONDS = 24 * 3600.0
"""The row of a worker that was silent for this long is deleted."""

_KILL_MARGIN_SECONDS = 1.0
"""Trainers are killed this many seconds before their lease ends, which is enough time for them to end."""

_ENFORCE_INTERVAL_SECONDS = 0.2


class Trainer(Protocol):
    """A trainer at work: a process of this machine (trainer_process.py), or one that an engine runs
    (executors/remote_trainer.py)."""

    evicted_because: str | None
    """Why its engine has ended it, for a reason that is not the job's; None: it has not."""

    @property
    def pid(self) -> int | str | None:
        """What identifies it in logs."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has not started yet, since its engine has no free devices."""

    @property
    def overdue(self) -> bool:
        """Whether the grace period of a requested stop is over."""

    def new_messages(self) -> list[str]:
        """What has happened in its engine since the last call."""

    def status(self) -> int | None:
        """The exit status, negative after a signal; None while it may be alive."""

    def sign_of_life(self) -> None:
        """Tells it that its lease is still valid."""

    def interrupt(self, grace_seconds: float) -> None:
        """Lets it write a checkpoint and end."""

    def kill(self) -> None:
        """Ends it now."""

    def close(self) -> None:
        """Releases its resources once it has ended."""


@dataclass
class Running:
    """A trainer at work. Times are of the monotonic clock, in seconds."""

    fence: Fence
    devices: tuple[Device, ...]
    """One for each rank."""
    trainer: Trainer
    run: RunDirectory
    lease_until: float
    timeout_at: float | None
    grace_seconds: float
    """How long an interrupted trainer may take to write a checkpoint and exit."""
    requested_devices: int
    """The devices that the job requested; more than `devices` if no worker had as many."""
    position: Position = field(default_factory=Position)
    started_at: float = field(default_factory=time.monotonic)
    last_sign_at: float = field(default_factory=time.monotonic)
    """When the run directory was last seen to have changed (looked at only every `no_progress_seconds`)."""
    last_signs: tuple[int, int] = (0, 0)
    """What its run directory showed by then (`RunDirectory.signs_of_work`)."""
    requested: RequestedAction | None = None
    """The action that a user has requested (pause, cancel, stop), as of the last renewal."""
    interrupted_because: str | None = None
    """Why the worker has interrupted the trainer, or None."""
    makes_way: bool = False
    """Whether it was interrupted for a job with a higher priority."""
    cooling_since: float | None = None
    """When training was paused because a GPU was too hot, or None if it is not paused."""
    timed_out: bool = False
    stuck: bool = False
    """Whether the trainer was ended because it made no progress."""
    broken: Failure | None = None
    """An unexpected error of the worker while handling this job. It counts as a crash; further reports are
    ignored."""
    failed_device: bool | None = None
    """Whether one of the trainer's devices has failed, or None if no failure was reported or it was not
    checked yet."""
    lost: bool = False
    """Whether the job may belong to another worker now; the supervisor then kills the trainer."""
    upload: RunUpload | None = None
    """Puts the run directory into object storage; None: it stays on this machine."""
    waited_until: float | None = None
    """Until when the trainer waited in its engine's queue, if its start is not noted yet; otherwise None."""

    def note_still_waiting(self, now: float) -> None:
        """Notes that the trainer has not started yet: this time does not count towards its time limits."""
        if self.timeout_at is not None:
            self.timeout_at += now - (self.waited_until or self.started_at)
        self.waited_until = self.last_sign_at = now


class LeaseKeeper:
    """Sends the heartbeat, renews the leases, and kills trainers whose lease it could not renew.

    Args:
        running: returns the trainers that the supervisor runs at the moment.
        devices: returns the devices of this machine.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        running: Callable[[], list[Running]],
        devices: Callable[[], list[Device]],
        labels: Callable[[], dict[str, str]],
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._running = running
        self._devices, self._labels = devices, labels
        self._started_at = time.time()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs both threads until the end of the block."""
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("leases", self._renew_loop), ("deadlines", self._enforce_loop))
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
        """One round: renews the leases, sends the worker's heartbeat, and returns lost jobs to the queue.

        The worker's own leases come first, so that they are not lost if the clock has jumped ahead.
        """
        for running in self._running():
            if not running.lost:
                self._renew(database, running)
        with database.writing() as session:
            live_workers.beat(session, self._row())
            live_workers.forget(session, [], DELETE_WORKER_AFTER_SECONDS)
        with database.writing() as session:
            for job_id in queue.reclaim_expired(session):
                log.warning("job rescued from a lost worker", job=job_id)

    def enforce(self) -> None:
        """Kills trainers that would outlive their lease, and those that did not stop in time."""
        for running in self._running():
            if running.trainer.status() is not None:
                continue
            if time.monotonic() > running.lease_until - _KILL_MARGIN_SECONDS:
                running.lost = True
                running.trainer.kill()
            elif running.trainer.overdue:
                running.trainer.kill()
            else:
                running.trainer.sign_of_life()

    def _renew_loop(self) -> None:
        lease = self._settings.lease_seconds
        url = self._settings.resolved_database_url
        database = Database(url, timeout_seconds=lease / 3, idle_seconds=lease)
        while not self._stopped.is_set():
            try:
                self.beat(database)
            except (SQLAlchemyError, ReplacedDatabase) as error:
                log.warning("the database did not answer", error=str(error).splitlines()[0])
            except Exception:
                log.exception(
                    "the heartbeat failed unexpectedly"
                )  # the next round may succeed: this thread must go on
            self._stopped.wait(self._settings.heartbeat_seconds)
        database.close()

    def _enforce_loop(self) -> None:
        while not self._stopped.wait(_ENFORCE_INTERVAL_SECONDS):
            try:
                self.enforce()
            except Exception:
                log.exception("checking the deadlines failed")

    def _renew(self, database: Database, running: Running) -> None:
        sent_at = time.monotonic()
        try:
            with database.writing() as session:
                requested = queue.renew_lease(session, running.fence, self._settings.lease_seconds)
        except LostJob:
            running.lost = True
            return
        running.requested = requested
        running.lease_until = sent_at + self._settings.lease_seconds

    def _row(self) -> Worker:
        return Worker(
            id=self._worker_id,
            hostname=socket.gethostname(),
            started_at=self._started_at,
            heartbeat_at=0.0,
            devices=[_as_row(device) for device in self._devices()],
            running=[running.fence.job_id for running in self._running() for _ in running.devices],
            labels=self._labels(),
        )


def _as_row(device: Device) -> dict[str, Any]:
    """A device as the database stores it: without its UUID, which only this machine needs."""
    return {name: value for name, value in asdict(device).items() if name != "uuid"}
