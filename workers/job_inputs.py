"""Fetches what a claimed job needs from object storage, before its trainer is started: its run directory, if
another machine worked on it last, and its data and models."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from app.contract.spec import Spec
from app.jobs.transitions import Fence
from app.models import base_models
from app.settings import Settings
from app.storage import stored_files
from app.storage.disk import remove_tree
from app.storage.objects import ObjectStorage, move_into_place
from workers.run_directory import INTERRUPTED, RunDirectory

log = structlog.get_logger("accrue.worker")


@dataclass(frozen=True)
class Inputs:
    """Where a job's inputs are on this machine."""

    data_file: str
    validation_file: str | None
    model_path: str
    layer_paths: tuple[str, ...]
    stored_attempt: int = 0
    """The attempt under which object storage keeps the run directory. It is the job's, unless object storage
    has a newer attempt already, because an older database was restored; then it is the one after that."""


def find_inputs(spec: Spec, settings: Settings) -> Inputs:
    """Finds a job's inputs, and fetches those that only object storage has.

    Raises:
        Unavailable: the object storage cannot be used.
        ValueError: the model is local, and ACCRUE_MODELS_DIR is not set for the worker.
    """
    validation = spec.data.validation
    has_own = validation is not None and validation.file_id is not None
    return Inputs(
        data_file=str(stored_files.path_of_file(settings, spec.data.file_id)),
        validation_file=str(stored_files.path_of_file(settings, str(validation.file_id)))
        if validation is not None and has_own
        else None,
        model_path=base_models.path_of(spec.model, settings),
        layer_paths=base_models.layer_paths(spec.model, settings),
    )


def fetch_run(
    settings: Settings, storage: ObjectStorage, fence: Fence, is_cancelled: Callable[[], bool]
) -> int:
    """Makes this machine's run directory the newest one of the job. Returns `Inputs.stored_attempt`.

    Raises:
        Unavailable: the object storage cannot be used.
        Damaged: an object has another content than its manifest says.
        RunDirectoryInUse: an earlier trainer of the job has not ended yet.
        OSError: the disk is full.
    """
    run = RunDirectory(settings.runs_dir / fence.job_id)
    stored = stored_files.stored_run(storage, fence.job_id)
    own, newest = stored_files.attempt_of_run(run.path), stored.newest()
    attempt = max(fence.attempt, 0 if newest is None else newest.attempt + 1)
    if own == fence.attempt - 1 and own > 0:
        return attempt  # no other machine has worked on it since
    if newest is None or newest.attempt <= own:
        return attempt
    incoming = settings.copies_dir / "incoming" / f"{fence.job_id}.{fence.attempt}"
    try:
        fetched = stored.fetch(incoming, _is_of_run, newest, is_cancelled)
        if run.path.exists():
            with run.locked():
                if fetched is None or is_cancelled():
                    return attempt
                if not remove_tree(run.path):
                    raise OSError(errno.ENOTEMPTY, "the earlier run directory cannot be deleted")
        if fetched is not None and not is_cancelled():
            move_into_place(incoming, run.path)
            log.info("run directory fetched", job=fence.job_id, version=fetched.name)
        return attempt
    finally:
        remove_tree(incoming)


def _is_of_run(path: str) -> bool:
    """Whether a file of a run directory is needed to continue training. Trained models are not."""
    return "model" not in path.split("/")[:2]


class PendingTrainer:
    """Takes the place of a job's trainer while its files are fetched, which may take long.

    Args:
        fetch: fetches them; it is given a function that returns whether fetching was cancelled.
        device_locks: descriptors of the devices' locks, which stay locked meanwhile.
    """

    def __init__(
        self, fetch: Callable[[Callable[[], bool]], Inputs], device_locks: Sequence[int] = ()
    ) -> None:
        self._fetch = fetch
        self.inputs: Inputs | None = None
        """What was fetched, once it is there."""
        self.error: Exception | None = None
        """Why it cannot be fetched, or None."""
        self._status: int | None = None
        self.evicted_because: str | None = None
        self.locks = [os.dup(lock) for lock in device_locks]
        threading.Thread(target=self._work, daemon=True, name="fetch").start()

    def _work(self) -> None:
        try:
            self.inputs = self._fetch(lambda: self._status is not None)
        except Exception as error:
            self.error = error

    @property
    def pid(self) -> str:
        """What identifies it in logs."""
        return "fetching"

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer has not started yet."""
        return self._status is None

    @property
    def overdue(self) -> bool:
        """Whether the grace period of a requested stop is over: it needs none."""
        return False

    def new_messages(self) -> list[str]:
        """What has happened since the last call."""
        return []

    def status(self) -> int | None:
        """The exit status; None while files are fetched, or the trainer can be started."""
        return self._status

    def sign_of_life(self) -> None:
        """Fetching needs no lease: it changes nothing that another worker uses."""

    def interrupt(self, grace_seconds: float) -> None:
        """Ends without starting a trainer."""
        self._status = INTERRUPTED

    def kill(self) -> None:
        """Ends without starting a trainer."""
        self._status = -signal.SIGKILL

    def close(self) -> None:
        """Unlocks the devices."""
        for lock in self.locks:
            os.close(lock)
        self.locks = []
