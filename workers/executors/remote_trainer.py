"""A trainer that an engine runs: for the supervisor, it behaves like a process of its own machine.

A thread talks to the engine, which may take long to answer, or not answer at all. Nothing depends on that:
the nodes end by themselves when this worker stops renewing (shared_files.py), so a trainer counts as ended if
its nodes say so, or if the engine says so and the nodes must have noticed that they are not renewed.
"""

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from app.contract.regular_files import read_regular
from app.contract.reports import Failure
from app.jobs.transitions import LostJob
from workers.executors.protocol import Executor, Launch, LaunchStatus, Refused, Unreachable
from workers.executors.shared_files import LaunchOrder, NewerLaunch, NodeEnd, SharedFiles
from workers.run_directory import INTERRUPTED, LOST_RANK, RANKS_MUST_RESTART, RunDirectory

log = structlog.get_logger("accrue.worker")

_LOOK_SECONDS = 0.5
"""How often the run directory is looked at, and the renewals are changed."""

_POLL_SECONDS = 3.0
"""How often the engine is asked."""

_REST_SECONDS = 3.0
"""How long the nodes that have not ended are waited for once one has failed: another may know the cause."""

_MARGIN_SECONDS = 5.0
"""Nodes end within this time after they have noticed that the worker no longer renews."""

_MOST_LAUNCHES = 30
"""The job fails after this many launches of one attempt have ended because all ranks had to start again."""


@dataclass(frozen=True)
class LaunchParameters:
    """What a trainer may do, and how long its worker may be silent."""

    job_id: str
    attempt: int
    silence_seconds: float
    grace_seconds: float
    network: bool
    view: str


def handle_of(job_id: str, attempt: int, number: int = 1) -> str:
    """The name of a launch: job and attempt and, from the second launch of an attempt on, its number (all
    ranks had to start again)."""
    return f"accrue-{job_id}-{attempt}" + (f".{number}" if number > 1 else "")


class RemoteTrainer:
    """One attempt's trainer, in an engine.

    Args:
        run: holds the assignment already.
        device_locks: descriptors that are held until the trainer has ended.

    Raises:
        LostJob: another worker has launched a later attempt.
        OSError: the disk is full.
    """

    def __init__(
        self,
        executor: Executor,
        run: RunDirectory,
        launch: Launch,
        parameters: LaunchParameters,
        device_locks: Sequence[int],
    ) -> None:
        self._executor, self._run, self._launch, self._parameters = executor, run, launch, parameters
        self._files = SharedFiles(launch.folder)
        self._status: int | None = None
        self._killed = False
        self._kill_at: float | None = None
        self._renewed_at = time.monotonic()
        self._lost_at: float | None = None
        """When the engine said for the second time in a row that it has no such launch, or that it has ended,
        although not all nodes have reported their ends; otherwise None."""
        self._messages: list[str] = []
        self._found = LaunchStatus("waiting")
        self._has_started = False
        """Whether all nodes have begun to train."""
        self._wakes = threading.Event()
        self.evicted_because: str | None = None
        """Why the engine ended the trainer, for a reason that is not the job's; None: it did not."""
        self._order = self._make_order()
        try:
            earlier = self._files.write_launch(self._order)
        except NewerLaunch:
            raise LostJob from None
        self._locks = [os.dup(lock) for lock in device_locks]
        threading.Thread(target=self._follow, args=(earlier,), daemon=True, name=launch.handle).start()

    @property
    def pid(self) -> str:
        """What identifies the trainer in logs."""
        return self._launch.handle

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer has not started yet, since the engine has no free devices."""
        return not self._has_started and self._status is None

    def new_messages(self) -> list[str]:
        """What has happened in the engine since the last call, for the job's owner."""
        found, self._messages = self._messages, []
        return found

    def status(self) -> int | None:
        """The exit status; None while the trainer may be alive."""
        return self._status

    def sign_of_life(self) -> None:
        """Lets the nodes go on."""
        now = time.monotonic()
        if not self._killed and self._lost_at is None and now > self._renewed_at + _LOOK_SECONDS:
            with contextlib.suppress(OSError):
                self._files.renew(self._launch.handle)
            self._renewed_at = time.monotonic()  # nodes may see it even if this failed, or took long

    def interrupt(self, grace_seconds: float) -> None:
        """Lets the trainer write a checkpoint and end. It is `overdue` after the grace period."""
        self._kill_at = time.monotonic() + grace_seconds
        with contextlib.suppress(OSError):
            self._files.request_stop(self._launch.handle, "interrupt")
        self._wakes.set()

    @property
    def overdue(self) -> bool:
        """Whether the grace period of a requested stop is over."""
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def kill(self) -> None:
        """Ends the trainer without a checkpoint."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):
                self._files.request_stop(self._launch.handle, "kill")
            self._wakes.set()

    def close(self) -> None:
        """Releases the resources of a trainer that has ended."""
        self._wakes.set()
        while self._locks:
            os.close(self._locks.pop())

    def _make_order(self) -> LaunchOrder:
        assignment = read_regular(self._run.path, "spec.json") or b""
        return LaunchOrder(
            executor=self._executor.name,
            handle=self._launch.handle,
            attempt=self._parameters.attempt,
            run_dir=str(self._run.path),
            assignment_sha256=hashlib.sha256(assignment).hexdigest(),
            nodes=self._launch.nodes,
            devices_per_node=self._launch.devices_per_node,
            silence_seconds=self._parameters.silence_seconds,
            grace_seconds=self._launch.grace_seconds,
            network=self._parameters.network,
            view=self._parameters.view,
        )

    def _follow(self, earlier: LaunchOrder | None) -> None:
        """Runs in a thread: launches the trainer, and watches it until it has ended."""
        try:
            if earlier is not None:
                self._end_earlier(earlier)
            status = self._run_once()
            for number in range(2, _MOST_LAUNCHES + 2):
                if status != RANKS_MUST_RESTART or self._killed or self._kill_at is not None:
                    break
                if number > _MOST_LAUNCHES:
                    remedy = "use ddp, more devices, or a smaller max_length"
                    message = f"the ranks ran out of memory too often: {remedy}"
                    self._fail(Failure(code="out_of_memory", message=message, permanent=True))
                    break
                handle = handle_of(self._parameters.job_id, self._parameters.attempt, number)
                self._launch = replace(self._launch, handle=handle)
                self._order = self._order.model_copy(update={"handle": handle})
                self._files.write_launch(self._order)
                status = self._run_once()
        except Refused as error:
            self._fail(Failure(code="not_started", message=str(error), permanent=True))
            status = 1
        except NewerLaunch:
            status = -signal.SIGKILL  # the lease is lost, and the supervisor knows
        except Exception:
            log.exception("the trainer's engine cannot be used", launch=self._launch.handle)
            self._killed = True  # the nodes end without renewals
            self._wait(self._parameters.silence_seconds + _MARGIN_SECONDS)
            status = 1
        self._status = status

    def _run_once(self) -> int:
        self._found, self._lost_at, self._has_started = LaunchStatus("waiting"), None, False
        if not self._submit():
            self._cancel()
            return INTERRUPTED if self._kill_at is not None and not self._killed else -signal.SIGKILL
        status = self._watch()
        self._cancel()  # what is left of it: nodes that wait for those that have ended
        return status

    def _end_earlier(self, earlier: LaunchOrder) -> None:
        """Ends the launch of an earlier attempt, which its worker could not end. Its nodes end by themselves
        too; this only frees their devices sooner."""
        if earlier.executor == self._executor.name and earlier.handle != self._launch.handle:
            with contextlib.suppress(Unreachable):
                self._executor.cancel(earlier.handle)

    def _submit(self) -> bool:
        """Submits the launch, as soon as the engine can be reached. Returns whether it did: a request to stop
        may come first.

        Raises:
            Refused: the engine will never run it.
        """
        unreachable = False
        while not (self._killed or self._kill_at is not None):
            try:
                self._executor.submit(self._launch)
            except Unreachable as error:
                if not unreachable:
                    self._say(f"{self._executor.name} does not respond; trying again: {error}")
                unreachable = True
                self._wait(_POLL_SECONDS)
            else:
                return True
        return False

    def _watch(self) -> int:
        """Watches a submitted launch until it has ended. Returns the trainer's exit status."""
        polled_at = -_POLL_SECONDS
        failed_at: float | None = None
        while True:
            now = time.monotonic()
            self._has_started |= self._files.started(self._order) == self._launch.nodes
            ends = self._files.ends(self._order)
            if len(ends) == self._launch.nodes and not any(end.status for end in ends.values()):
                return 0
            if any(end.status for end in ends.values()):
                failed_at = failed_at or now
                if len(ends) == self._launch.nodes or now > failed_at + _REST_SECONDS:
                    return self._status_of(ends)
            if not self._has_started and (self._kill_at is not None or self._killed):
                self._cancel()  # there is no checkpoint to wait for
            if self._killed:
                self._cancel()
            if now > polled_at + _POLL_SECONDS or self._wakes.is_set():
                polled_at = now
                self._wakes.clear()
                self._poll()
                continue  # the nodes may have reported their ends meanwhile
            if self._lost_at is not None or self._killed:
                is_asked = self._killed or self._kill_at is not None
                is_gone = self._lost_at is not None and self._files.started(self._order) == 0
                if self._is_silent(_MARGIN_SECONDS) or (is_gone and is_asked):
                    return self._status_without_report()
            self._wait(_LOOK_SECONDS)

    def _poll(self) -> None:
        try:
            found = self._executor.poll(self._launch.handle)
        except Unreachable:
            return  # what it said last holds
        if (found.state, found.reason) != (self._found.state, self._found.reason):
            where = self._executor.name
            if found.state == "waiting":
                self._say(f"The trainer waits in {where}" + (f": {found.reason}." if found.reason else "."))
            elif found.state == "running" and self._found.state == "waiting":
                self._say(f"The trainer starts in {where}.")
        was_lost = self._found.state in ("ended", "unknown")
        self._found = found
        if found.state in ("waiting", "running"):
            self._lost_at = None
        elif was_lost or self._killed or self._kill_at is not None:
            # Said twice: just after its submission, an engine may not list a launch yet.
            self._lost_at = self._lost_at or time.monotonic()

    def _is_silent(self, margin: float = 0.0) -> bool:
        """Whether the nodes must have noticed that there are no renewals."""
        return time.monotonic() > self._renewed_at + self._parameters.silence_seconds + margin

    def _status_of(self, ends: dict[int, NodeEnd]) -> int:
        """The exit status of a trainer of which some nodes have failed: the most telling one."""
        if self._lost_at is not None and self._is_silent():
            return self._status_without_report()  # the nodes ended for lack of renewals
        failed = [end.status for end in ends.values() if end.status]
        causes = [each for each in failed if each not in (INTERRUPTED, LOST_RANK, -signal.SIGKILL)]
        if RANKS_MUST_RESTART in failed:
            return RANKS_MUST_RESTART
        if causes:
            return causes[0]
        is_asked = self._killed or self._kill_at is not None
        if not is_asked and any(end.was_evicted for end in ends.values()):
            self.evicted_because = f"{self._executor.name} took its devices away"
        elif not is_asked and len(ends) < self._launch.nodes:
            self._poll()
            if self._found.was_evicted:
                self.evicted_because = f"a node of {self._executor.name} was lost"
        for status in (INTERRUPTED, -signal.SIGKILL):
            if status in failed:
                return status
        if self._run.failure() is None and self.evicted_because is None:
            message = "the ranks lost their connection to each other"
            self._fail(Failure(code="rank_lost", message=message, permanent=False))
        return LOST_RANK

    def _status_without_report(self) -> int:
        """The exit status of a trainer whose nodes have ended without saying how."""
        if self._kill_at is not None and not self._killed:
            return INTERRUPTED
        if self._killed:
            return -signal.SIGKILL
        name, why = self._executor.name, f" ({self._found.reason})" if self._found.reason else ""
        if self._found.was_evicted:
            self.evicted_because = f"{name} took its devices away{why}"
            return INTERRUPTED
        if self._run.failure() is None:
            last = self._last_line()
            printed = f". Its last output: {last}" if last else ""
            message = f"{name}'s job of the trainer ended without a result{why}{printed}"
            self._fail(Failure(code="trainer_lost", message=message, permanent=False))
        return 1

    def _last_line(self) -> str:
        """What the nodes have printed last."""
        with contextlib.suppress(Unreachable):
            printed, _ = self._executor.logs(self._launch.handle, self._launch.folder, 0)
            return next(iter(printed.strip().splitlines()[-1:]), "")[:300]
        return ""

    def _fail(self, failure: Failure) -> None:
        with contextlib.suppress(OSError):
            self._run.write_failure(failure)

    def _cancel(self) -> None:
        with contextlib.suppress(Unreachable):  # the nodes end without renewals
            self._executor.cancel(self._launch.handle)

    def _say(self, message: str) -> None:
        log.info(message, launch=self._launch.handle)
        self._messages.append(message)

    def _wait(self, seconds: float) -> None:
        self._wakes.wait(seconds)
        self._wakes.clear()
