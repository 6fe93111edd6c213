"""One process per worker: claims jobs for free devices, runs a trainer for each, watches, finishes.

The loop is a single thread, since trainers get their parent-death signal when the thread that started them
ends. Each turn first does what must not wait for the database, then stores the trainers' reports, then claims
jobs. Leases have their own threads (leases.py).
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError

from app.contract.fail_points import fail_point
from app.contract.reports import Failure
from app.devices import live_workers
from app.errors import ReplacedDatabase
from app.exports import requests as export_requests
from app.inference import requests
from app.jobs import events, queue, transitions
from app.jobs.reservations import DeviceId
from app.jobs.transitions import Fence, LostJob
from app.planning.devices import Device
from app.settings import Settings
from app.storage.database import Database, is_unavailable
from app.storage.ids import new_id
from app.storage.session import Session
from workers import helper_process, job_measurements, temperature
from workers.device_locks import DeviceLocks
from workers.disk_cleaner import DiskCleaner
from workers.executors.protocol import Executor
from workers.helper_process import HelperProcess
from workers.ingest import Position, ingest
from workers.job_end import DEVICE_LOST, end_attempt, end_job
from workers.job_inputs import PendingTrainer
from workers.job_start import JobStart
from workers.leases import DELETE_WORKER_AFTER_SECONDS, LeaseKeeper, Running
from workers.offers import Offered, Offers, chosen_devices, device_ids
from workers.preemptor import Preemptor
from workers.slots import Slots, labels_of
from workers.temperature import CoolingState
from workers.trainer_launcher import TrainerLauncher
from workers.training.processes.fork_server import ForkServer

log = structlog.get_logger("accrue.worker")

_PREPARE_INFERENCE_SECONDS = 20.0
"""The seconds of training after which the inference process is started, so that the trained model can answer
soon after its end."""

_TURN_SECONDS = 0.25
"""The maximum time that one turn spends on storing one trainer's reports."""


@dataclass
class Supervisor:
    """Runs until `stop()`, and returns every job to the queue at the end."""

    settings: Settings
    database: Database
    slots: Slots
    executor: Executor | None = None
    """The engine that runs the trainers; None: they run on this machine."""
    id: str = field(default_factory=lambda: new_id("worker"))
    running: list[Running] = field(default_factory=list)
    leaving: list[Running] = field(default_factory=list)
    """Killed trainers that have not ended yet, and hold their devices until then."""
    stopped: bool = False
    hurried: bool = False
    """Whether a stop was requested twice: trainers are killed, and their jobs resume from the last
    checkpoint."""
    draining: bool = False
    """Whether the worker claims no more jobs, and ends when none runs."""
    until_empty: bool = False
    """Whether the worker ends when no job is running or queued."""

    def __post_init__(self) -> None:
        self._unclaimed: frozenset[DeviceId] = frozenset()
        """The devices that no job has claimed in this turn."""
        self.locks = DeviceLocks(self.settings)
        self.offers = Offers(self.settings)
        self.disk_cleaner = DiskCleaner(
            self.settings, self.database, lambda: {each.fence.job_id for each in self._alive()}
        )
        self.preemptor = Preemptor(self.settings, self.database, self.id)
        self.fork_server = ForkServer() if self.settings.fork_trainers else None
        launcher = TrainerLauncher(self.settings, self.database, self.executor, self.fork_server)
        self.start = JobStart(self.settings, self.database, launcher)
        self.leases = LeaseKeeper(
            self.settings, self.id, lambda: list(self.running), self.slots.available, self.labels
        )

    def labels(self) -> dict[str, str]:
        """The worker's labels: what is known of its machine, and the labels of its settings."""
        engine = {"executor": self.settings.executor}
        return {**labels_of(self.slots.available()), **engine, **self.settings.labels}

    def run(self) -> None:
        """Runs until it is stopped; then stops the trainers and returns their jobs to the queue."""
        self.slots.measure_contexts()  # before a job needs the GPUs
        log.info("worker started", worker=self.id, devices=[device.name for device in self.slots.available()])
        profiler = helper_process.profiler(self.settings)
        inference = helper_process.inference(self.settings)
        exports = helper_process.exports(self.settings)
        self.disk_cleaner.start()
        with self.leases.at_work():
            while not self.stopped:
                if self.settings.profiler:
                    profiler.keep_alive()
                if self._should_start_inference(inference):
                    inference.keep_alive()
                if self._should_start_exports(exports):
                    exports.keep_alive()
                self.turn()
                done = False
                with self._guarded(None):
                    claimed = not self.draining and self._claim_for_free_devices()
                    if not (claimed or self.draining):
                        self._let_grow()
                        if self.settings.preemption:
                            self._make_way()
                    done = not (claimed or self.running or self.leaving) and self._is_done()
                if done:
                    break
                time.sleep(self.settings.poll_seconds)
            profiler.end()
            inference.end()
            exports.end()
            self.disk_cleaner.end()
            for running in self.running:
                self._interrupt(running, "the worker was shut down")
            while self.running or self.leaving:
                if self.hurried:
                    for running in self.running:
                        running.trainer.kill()
                self.turn()
                time.sleep(min(0.1, self.settings.poll_seconds))
            if self.fork_server is not None:
                self.fork_server.close()
        with self._guarded(None), self.database.writing() as session:
            live_workers.forget(session, [self.id], DELETE_WORKER_AFTER_SECONDS)
        log.info("worker stopped", worker=self.id)

    def _should_start_inference(self, inference: HelperProcess) -> bool:
        """Whether the inference process should run: a request waits, or a job has been training for a while,
        whose model somebody will want to try."""
        if self.settings.inference == "off" or self.draining or inference.is_alive:
            return False
        prepared = time.monotonic() - _PREPARE_INFERENCE_SECONDS
        if any(running.started_at < prepared for running in self.running):
            return True
        with self._guarded(None), self.database.reading() as session:
            return requests.any_unclaimed(session)
        return False

    def _should_start_exports(self, exports: HelperProcess) -> bool:
        """Whether the export process should run: an export waits."""
        if self.draining or exports.is_alive:
            return False
        with self._guarded(None), self.database.reading() as session:
            return export_requests.any_unclaimed(session)
        return False

    def _is_done(self) -> bool:
        """Whether a worker without anything to do should end."""
        if self.draining or not self.until_empty:
            return self.draining
        with self.database.reading() as session:
            return not queue.any_queued(session, self.labels())

    def stop(self, *_: Any) -> None:
        """The handler of SIGTERM and SIGINT: ends the run at the next turn; the second time, at once."""
        self.hurried = self.stopped
        self.stopped = True

    def drain(self, *_: Any) -> None:
        """The handler of SIGUSR1: finishes what runs, claims nothing more, and ends."""
        self.draining = True

    def turn(self) -> None:
        """Handles every running trainer once. Leases are renewed elsewhere (`LeaseKeeper`)."""
        for running in list(self.running):
            with self._guarded(running):
                self._enforce_limits(running)
        self._reap_killed()
        for running in list(self.running):
            with self._guarded(running):
                self._store_progress(running)

    def _enforce_limits(self, running: Running) -> None:
        """Enforces a trainer's limits and requests. This does not use the database."""
        now = time.monotonic()
        if running.trainer.is_waiting:
            running.note_still_waiting(now)
        if running.lost:
            self._lose(running)
        elif running.broken is not None:
            running.trainer.kill()
        elif running.trainer.status() is not None:
            if self.stopped and now > running.lease_until:
                self._release(running)  # its end could not be stored: the next worker claims the job
        elif running.requested == "stop" and not (
            isinstance(running.trainer, PendingTrainer) or running.run.finish_requested()
        ):
            running.run.request_finish()
        elif running.requested in ("pause", "cancel") and not running.interrupted_because:
            self._interrupt(running, "paused" if running.requested == "pause" else "cancelled")
        elif running.timeout_at is not None and now > running.timeout_at and not running.interrupted_because:
            running.timed_out = True
            self._interrupt(running, "timeout")
        elif not running.interrupted_because and self._enforce_temperature(running):
            pass
        elif running.trainer.is_waiting and not device_ids(running.devices) <= self._there():
            self._interrupt(running, "the engine no longer has as many devices")
        elif self._is_stuck(running) and not running.interrupted_because:
            running.stuck = True
            running.trainer.kill()
        elif (gone := self._first(running, self.slots.is_gone)) and not running.interrupted_because:
            running.interrupted_because = f"its GPU {gone.name} has disappeared"
            self.slots.set_aside(gone, "nvidia-smi does not show it")
            running.trainer.kill()

    def _there(self) -> frozenset[DeviceId]:
        return device_ids(self.slots.available())

    def _first(self, running: Running, is_so: Callable[[Device], bool]) -> Device | None:
        """The first of a trainer's devices for which `is_so` returns true."""
        return next((device for device in running.devices if is_so(device)), None)

    def _enforce_temperature(self, running: Running) -> bool:
        """Pauses a trainer whose GPU is too hot, and stops it if its GPU does not cool down."""
        cooling = temperature.enforce(running, self.slots, self.settings.max_gpu_temperature)
        if cooling is CoolingState.STAYS_HOT:
            self._interrupt(running, "its GPU stayed too hot (ACCRUE_MAX_GPU_TEMPERATURE)")
        return cooling is not CoolingState.BELOW_LIMIT

    def _is_stuck(self, running: Running) -> bool:
        """Whether nothing in its run directory has changed for too long."""
        now = time.monotonic()
        if now < running.last_sign_at + self.settings.no_progress_seconds:
            return False
        signs = running.run.signs_of_work()
        if signs == running.last_signs:
            return True
        running.last_sign_at, running.last_signs = now, signs
        return False

    def _claim_for_free_devices(self) -> bool:
        """Claims jobs for the free devices. Returns whether any job was claimed."""
        taken = {device.id for running in self._alive() for device in running.devices}
        free: dict[Device, int] = {}
        for device in self.slots.usable():
            lock = self.locks.take(device) if device.id not in taken else None
            if lock is not None:
                free[device] = lock
        claimed = False
        try:
            claimed = self._claim_held(free)
            while free and self._claim(free):
                claimed = True
            self._unclaimed = device_ids(free)
        finally:
            for lock in free.values():
                os.close(lock)
        return claimed

    def _make_way(self) -> None:
        """Interrupts jobs for one with a higher priority, if there is one that needs it."""
        if not self.running:
            return
        staying = [each for each in self.running if not each.interrupted_because]
        going = [each for each in self._alive() if each not in staying]
        found = self.preemptor.look(staying, going, self._unclaimed, self.offers, self.labels())
        if found is None:
            return
        for running in found[1]:
            log.info("a job makes way for another", job=running.fence.job_id, other=found[0])
            running.makes_way = True
            self._interrupt(running, "a job with a higher priority needs its device")

    def _let_grow(self) -> None:
        """Interrupts the only job, if it has fewer devices than it requested and the worker has more by now:
        it continues on as many as there are."""
        if len(self._alive()) != 1 or not self.running or not self.settings.trainer_network:
            return
        (running,) = self.running
        is_short = len(running.devices) < running.requested_devices
        has_settled = time.monotonic() > running.started_at + self.settings.reserve_after_seconds
        if is_short and has_settled and self._unclaimed and not running.interrupted_because:
            self._interrupt(running, "more of the devices that it requested are free")

    def _claim_held(self, free: dict[Device, int]) -> bool:
        """Claims the jobs for which others have made way, if all of their devices are free now. Removes all
        held devices from `free`."""
        claimed = False
        for job_id, held in self.preemptor.still_held(self._alive()):
            own = self.preemptor.take(held, free)
            try:
                if len(own) == len(held.devices):
                    claimed |= self._claim(own, [self.offers.for_job(job_id, list(own), self.labels())])
                    del self.preemptor.held[job_id]
            finally:
                for lock in own.values():
                    os.close(lock)
        return claimed

    def _alive(self) -> list[Running]:
        """The trainers that have not ended, with those that were killed."""
        return [*self.running, *self.leaving]

    def _claim(self, free: dict[Device, int], offers: Iterable[Offered] | None = None) -> bool:
        """Claims a job, and starts its trainer on some of the free devices, which it removes from `free`.

        Args:
            free: maps devices to the descriptors of their locks.
            offers: what is offered; None: as the queue needs it.
        """
        if offers is None:
            with self.database.reading() as session:
                jobs = {device.id: each.fence.job_id for each in self._alive() for device in each.devices}
                offers = self.offers.make(session, self.slots, list(free), jobs, self.labels())
        claimed_at = time.monotonic()
        fence, offered = self._claim_first(offers)
        if fence is None:
            return False
        with self.database.reading() as session:
            job = transitions.get(session, fence.job_id)
        chosen = chosen_devices(job, offered)[: None if self.settings.trainer_network else 1]
        locks = {device: free.pop(device) for device in chosen}
        try:
            running = self.start.begin(job, fence, tuple(locks), claimed_at, list(locks.values()))
        finally:
            for lock in locks.values():
                os.close(lock)  # the trainer has inherited it, if one was started
        if running is not None:
            self.running.append(running)
        return True

    def _claim_first(self, offers: Iterable[Offered]) -> tuple[Fence | None, list[Device]]:
        """Claims a job for the first offer that some job can use. Returns it with the devices offered."""
        for devices, offer in offers:
            with self.database.writing() as session:
                fence = queue.claim(
                    session,
                    self.id,
                    self.settings.lease_seconds,
                    offer,
                    fairly=self.settings.fair_share,
                )
            if fence is not None:
                return fence, devices
        return None, []

    def _store_progress(self, running: Running) -> None:
        """Stores what the trainer has reported, and the job's end if the trainer has ended. After
        `_TURN_SECONDS`, the rest is left for the next turn, so that endless reports do not delay other
        trainers."""
        status, until = running.trainer.status(), time.monotonic() + _TURN_SECONDS
        if running.broken is not None:
            self._end_broken(running, status)
            return
        if isinstance(running.trainer, PendingTrainer):
            successor = self.start.go_on(running, running.trainer)
            if successor is not running:
                self.running += [] if successor is None else [successor]
                self._release(running)
            return
        is_awaited = not self.hurried and running.requested != "cancel"
        if status is not None and running.upload is not None and is_awaited:
            status = status if running.upload.finish() else None
        if status is not None:
            self._check_device(running)
        if running.waited_until is not None and not running.trainer.is_waiting:
            with self.database.writing() as session:
                queue.note_start(session, running.fence)
            running.waited_until = None
        if messages := running.trainer.new_messages():
            with self.database.writing() as session:
                for message in messages:
                    events.record_event(
                        session, transitions.get(session, running.fence.job_id), "engine", message
                    )
        while True:
            with self.database.writing() as session:
                position = self._ingest(session, running, status)
                fail_point("supervisor.ingested")
                if running.upload is not None and position.checkpoint_step > running.position.checkpoint_step:
                    running.upload.request()
                if position.tuning is not None and position.tuning != running.position.tuning:
                    job_measurements.store_tuning(session, running, position.tuning)
                if status is not None and position.caught_up:
                    end_job(session, running, status, self.settings, worker_is_stopping=self.stopped)
                    fail_point("supervisor.finishing")
            running.position = position
            if position.caught_up or time.monotonic() > until:
                break
        if status is not None and position.caught_up:
            self._release(running)

    def _ingest(self, session: Session, running: Running, status: int | None) -> Position:
        if (
            status not in (None, 0) and running.requested == "cancel"
        ):  # skip its last reports, which may be long
            return replace(running.position, caught_up=True)
        warm = max(
            (own for device in running.devices if (own := self.slots.temperature(device)) is not None),
            default=None,
        )
        return ingest(session, running.run, running.fence, running.position, warm)

    def _end_broken(self, running: Running, status: int | None) -> None:
        """Ends a job that the worker cannot handle, once its trainer is gone."""
        if status is None or running.broken is None:
            return
        try:
            end_attempt(self.database, running.fence, running.broken)
        except DBAPIError as error:
            if is_unavailable(error):
                raise
            log.exception("the job's crash cannot be written", job=running.fence.job_id)
        self._release(running)

    def _check_device(self, running: Running) -> None:
        """Checks the device if the trainer reported its failure, and sets it aside if the check fails too."""
        failure = running.run.failure()
        if failure is not None and failure.code == DEVICE_LOST and running.failed_device is None:
            failed = self._first(running, self.slots.has_failed)
            running.failed_device = failed is not None
            if failed is not None:
                self.slots.set_aside(failed, failure.message)

    def _interrupt(self, running: Running, why: str) -> None:
        if not running.interrupted_because:
            running.interrupted_because = why
            is_cancelled = running.requested == "cancel"  # no checkpoint is needed
            grace = self.settings.stop_grace_seconds if is_cancelled else running.grace_seconds
            running.trainer.interrupt(grace)

    def _lose(self, running: Running) -> None:
        """Kills the trainer of a job that belongs to another worker, or soon will."""
        log.warning("lost the job", job=running.fence.job_id, attempt=running.fence.attempt)
        running.trainer.kill()
        if running.upload is not None:
            running.upload.cancel()
        self.running.remove(running)
        self.leaving.append(running)
        self._reap_killed()

    def _reap_killed(self) -> None:
        for running in [each for each in self.leaving if each.trainer.status() is not None]:
            running.trainer.close()
            self.leaving.remove(running)

    def _release(self, running: Running) -> None:
        running.trainer.close()
        if running.upload is not None:
            running.upload.cancel()
        self.running.remove(running)

    @contextlib.contextmanager
    def _guarded(self, running: Running | None) -> Iterator[None]:
        """Keeps errors of one job, or of the database, from ending the worker.

        If the database does not answer, the next turn tries again; until then, trainers continue as long as
        their leases are valid. Besides the one in `_claim`, this is the supervisor's only broad except: an
        unexpected error while handling a job counts as that job's crash.
        """
        try:
            yield
        except ReplacedDatabase as error:
            log.error("nothing can be written", error=error.message)
        except LostJob:
            if running is not None:
                self._lose(running)
        except Exception as error:
            if isinstance(error, DBAPIError) and is_unavailable(error):
                log.warning("the database did not answer", error=str(error.orig))
                return
            log.exception("unexpected error", job=running.fence.job_id if running else None)
            if running is not None and running.broken is None:
                message = f"{type(error).__name__} in the worker: see the worker's log"
                running.broken = Failure(code="worker_error", message=message, permanent=False)
                running.trainer.kill()
