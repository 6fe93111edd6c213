"""The contract on disk between a supervisor and its trainer.

    spec.json        the assignment: written by the supervisor before each attempt, read by the trainer
    finish           requests that training ends early, with a model: written by the supervisor
    stored           the object storage into which the directory was put: written by the supervisor
    cooling          makes training pause between windows while it exists; says why: written by the supervisor

The trainer writes all others:

    metrics.jsonl    a line per optimizer step, over all attempts
    events.jsonl     a line per event, over all attempts
    learned-0.json   what a rank has learned by running out of memory in this attempt
    shares.jsonl     a line per change of the ranks' shares of the work, over all attempts
    tuning.jsonl     a line per decision about the token budget, over all attempts
    trial            while a window tries another token budget
    comparing-kernels-0  while a rank compares kernels of other packages with the model's own
    .base/           the base model's files, as links, made safe to load (training/models/model_files.py)
    base_model.json  identifies those files, so that every attempt trains from the same ones
    base_weights     a digest of the weights before the first step
    data/            the tokenised samples
    checkpoints/     step-00000050-0000-00003200/, ... (step, epoch, samples of that epoch)
    model/           the trained model
    progress.json    progress of the preparation, then within the current window: at most once a second
    completions.json how the model completes held-out prompts, before, during and after training
    profile/         what `profile: true` wrote
    replica-0/       the run directory of an independent replica, for which the job's trainer takes the place
                     of the supervisor
    outcome.json     how a successful run ended
    failure.json     why an attempt failed, if the trainer could report it (failure-1.json, … of other ranks)
    trainer.log      what the trainer printed
    at-work          changed now and then while the trainer works
    lock             held by the trainer while it lives

Needs only the standard library and pydantic.
"""

import contextlib
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from app.contract.assignment import Assignment
from app.contract.regular_files import (
    MAX_BYTES,
    NotRegular,
    append_regular,
    create_regular,
    folder,
    open_regular,
    read_regular,
)
from app.contract.reports import (
    Completions,
    Failure,
    LearnedLimits,
    Outcome,
    RankShares,
    TuningStep,
    WindowProgress,
)

INTERRUPTED = 75
"""Exit status of a trainer that was interrupted, and can continue from what it saved (EX_TEMPFAIL)."""

IN_USE = 73
"""Exit status of a trainer that another one of the same job kept waiting for too long (EX_CANTCREAT)."""

DISK_FULL = 74
"""Exit status of a trainer that could not write, perhaps not even failure.json (EX_IOERR)."""

NOTE_WORK_EVERY_SECONDS = 20.0
_LOOKED_AT_LEVELS, _MOST_LOOKED_AT = 4, 20_000

RANKS_MUST_RESTART = 77
"""Exit status of a rank after which all ranks start again from the last checkpoint."""

LOST_RANK = 76
"""Exit status of a rank that ends because it lost its connection to another rank."""

DISK_FULL_FAILURE = Failure(
    code="disk_full",
    message="the disk is full: the job continues from its last checkpoint once there is space",
    permanent=False,
)

LIFELINE_VARIABLE = "ACCRUE_LIFELINE_FD"
"""A pipe that the supervisor holds open: its end of file ends the trainer."""

SILENCE_VARIABLE = "ACCRUE_LIFELINE_SECONDS"
"""Seconds without data on that pipe after which the trainer ends: the supervisor hangs and its lease runs
out."""


_FINISH, _COOLING, _TRIAL, _KERNELS = "finish", "cooling", "trial", "comparing-kernels"
_STORED = "stored"

_STEP = re.compile(rb'\{"attempt":\d+,"step":(\d+),.*\}$')
"""Matches a whole line of the log; a line torn by a kill does not match."""

GPU_NAMES_VARIABLE = "ACCRUE_GPU_NAMES"
"""The environment variable that names a trainer's GPUs for CUDA, such as 0=GPU-f33a…,1=MIG-7c01…."""

HIDDEN_VARIABLE = "ACCRUE_HIDDEN_FOLDER"
"""A folder that is hidden from the trainer, and the files in it that the trainer needs (JSON)."""

SECRET_FILES_VARIABLE = "ACCRUE_SECRET_FILES"
"""The worker's own files with keys and passwords, which are hidden from trainers: absolute paths, separated
as in PATH."""


TOKEN_VARIABLE = "ACCRUE_HUB_TOKEN_FD"
"""A pipe from which the trainer reads the hub's token once, so that no environment contains the token."""


Content = TypeVar("Content", bound=BaseModel)


_MAX_BYTES = {
    "base_weights": 2**10,
    "cooling": 2**10,
    "stored": 2**12,
    "log line": 2**20,
    "shares.jsonl": 2**24,
    "tuning.jsonl": 2**24,
    "progress.json": 2**16,
    "failure.json": 2**16,
    "outcome.json": 2**20,
    "completions.json": 2**22,
}
"""The maximum size in bytes of a run's files and lines, by name."""


_FOLDERS = (".base", "data", "checkpoints", "exports", "model")
_FILES = (
    "spec.json", "metrics.jsonl", "events.jsonl", "shares.jsonl", "tuning.jsonl", "base_model.json",
    "base_weights", "progress.json", "completions.json", "outcome.json", "failure.json",
    "trainer.log", "at-work", "trial", "lock",
)  # fmt: skip


class RunDirectoryInUse(Exception):
    """Another trainer still holds the run directory."""


class DamagedRunDirectory(ValueError):
    """An entry of the run directory has been replaced by one of another kind."""


class RunDirectory:
    """The paths of one job's run, and the reading and writing of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.base = path / ".base"
        self.data = path / "data"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.trainer_log = path / "trainer.log"

    def check_entries(self) -> None:
        """Checks that files are regular files and folders are folders.

        Raises:
            DamagedRunDirectory: a link, a pipe or another kind of entry has taken the place of one of them.
        """
        for names, is_kind, kind in (
            ((".", *_FOLDERS), stat.S_ISDIR, "folder"),
            (_FILES, stat.S_ISREG, "file"),
        ):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    path = self.path if name == "." else self.path / name
                    if not is_kind(path.lstat().st_mode):
                        raise DamagedRunDirectory(
                            f"{path.name} in the job's run directory is no longer a {kind}: "
                            "delete the job, and submit it again"
                        )

    def write_assignment(self, assignment: Assignment) -> None:
        """Prepares the directory for an attempt, and removes the result of an earlier one."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for earlier in ("failure.json", "outcome.json", _FINISH):
            (self.path / earlier).unlink(missing_ok=True)
        for learned in self.path.glob("learned-*.json"):
            learned.unlink()
        write_atomically(self.path / "spec.json", assignment.model_dump_json(indent=1))

    def assignment(self) -> Assignment:
        """Reads the assignment.

        Raises:
            OSError: there is none.
            pydantic.ValidationError: the file is not an assignment.
        """
        with open_regular(self.path, "spec.json") as file:
            return Assignment.model_validate_json(file.read())

    def write_outcome(self, outcome: Outcome) -> None:
        write_atomically(self.path / "outcome.json", outcome.model_dump_json(indent=1))

    def outcome(self) -> Outcome | None:
        return self._read("outcome.json", Outcome)

    def write_progress(self, progress: WindowProgress) -> None:
        """Writes the progress without flushing it to disk: it is of no use after a power failure."""
        partial = self.path / ".progress.json.partial"
        with create_regular(partial) as file:
            file.write(progress.model_dump_json().encode())
        partial.rename(self.path / "progress.json")

    def progress(self) -> WindowProgress | None:
        return self._read("progress.json", WindowProgress)

    def request_finish(self) -> None:
        """Requests that the trainer ends after the current window and saves its model."""
        with contextlib.suppress(NotRegular):  # anything at that path counts as the request
            append_regular(self.path / _FINISH).close()

    def finish_requested(self) -> bool:
        return os.path.lexists(self.path / _FINISH)  # even if the trainer has put a broken link there

    def request_cooling_down(self, why: str) -> None:
        """Requests that the trainer pauses between windows."""
        with contextlib.suppress(OSError), create_regular(self.path / _COOLING) as file:
            file.write(why.encode()[: _MAX_BYTES[_COOLING]])

    def end_cooling_down(self) -> None:
        """Lets the trainer continue."""
        with contextlib.suppress(OSError), folder(self.path) as within:
            os.unlink(_COOLING, dir_fd=within)

    def why_cooling_down(self) -> str | None:
        """Why the trainer is to pause, or None if it is to train."""
        with contextlib.suppress(NotRegular):
            content = read_regular(self.path, _COOLING, max_bytes=_MAX_BYTES[_COOLING])
            return None if content is None else content.decode(errors="replace")
        return None

    def write_digest_of_base(self, digest: str) -> None:
        write_atomically(self.path / "base_weights", digest)

    def digest_of_base(self) -> str | None:
        """The digest of the weights before the first step; None in runs of earlier versions."""
        with contextlib.suppress(NotRegular):
            content = read_regular(self.path, "base_weights", max_bytes=_MAX_BYTES["base_weights"])
            return None if content is None else content.decode(errors="replace")
        return None

    def write_completions(self, completions: Completions) -> None:
        write_atomically(self.path / "completions.json", completions.model_dump_json(indent=1))

    def completions(self) -> Completions | None:
        return self._read("completions.json", Completions)

    def write_failure(self, failure: Failure, rank: int = 0) -> None:
        name = f"failure-{rank}.json" if rank else "failure.json"
        write_atomically(self.path / name, failure.model_dump_json(indent=1))

    def failure(self) -> Failure | None:
        return self._read("failure.json", Failure)

    def write_learned(self, rank: int, learned: LearnedLimits) -> None:
        write_atomically(self.path / f"learned-{rank}.json", learned.model_dump_json())

    def learned(self, ranks: int) -> dict[int, LearnedLimits]:
        """What ranks have learned in this attempt, by rank."""
        found = {rank: self._read(f"learned-{rank}.json", LearnedLimits) for rank in range(ranks)}
        return {rank: own for rank, own in found.items() if own is not None}

    def append_shares(self, shares: RankShares) -> None:
        """Records that ranks take these shares of a window from now on."""
        self._record("shares.jsonl", shares)

    def shares(self) -> list[RankShares]:
        """What `append_shares` has recorded."""
        return self._recorded("shares.jsonl", RankShares)

    def append_tuning(self, decision: TuningStep) -> None:
        """Records a decision about the token budget."""
        self._record("tuning.jsonl", decision)

    def tuning(self) -> list[TuningStep]:
        """What `append_tuning` has recorded."""
        return self._recorded("tuning.jsonl", TuningStep)

    def forget_decisions(self, after: int) -> None:
        """Deletes the shares and token budgets recorded for steps after that one, which no reported window
        used, and lines that a kill has torn."""
        for name, kind in (("shares.jsonl", RankShares), ("tuning.jsonl", TuningStep)):
            recorded: Sequence[RankShares | TuningStep] = self._recorded(name, kind)
            kept = "".join(f"{line.model_dump_json()}\n" for line in recorded if line.step <= after)
            if recorded and kept.encode() != read_regular(self.path, name, max_bytes=_MAX_BYTES[name]):
                write_atomically(self.path / name, kept)

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Marks a window that tries another token budget: the mark stays only if the process is killed."""
        mark = self.path / _TRIAL
        mark.touch()
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    @property
    def was_killed_on_trial(self) -> bool:
        """Whether an attempt was killed within such a window."""
        return (self.path / _TRIAL).exists()

    def clear_trial(self) -> None:
        """Removes the mark, once its consequence is recorded."""
        (self.path / _TRIAL).unlink(missing_ok=True)

    @contextmanager
    def comparing_kernels(self, rank: int) -> Iterator[None]:
        """Marks that a rank compares the kernels of other packages with the model's own: the mark stays if
        that ends the process."""
        mark = self.path / f"{_KERNELS}-{rank}"
        mark.touch()
        yield
        mark.unlink(missing_ok=True)

    def was_ended_while_comparing_kernels(self, rank: int) -> bool:
        """Whether an attempt ended within such a comparison."""
        return (self.path / f"{_KERNELS}-{rank}").exists()

    def _record(self, name: str, line: BaseModel) -> None:
        with append_regular(self.path / name) as file:
            file.write(line.model_dump_json().encode() + b"\n")

    def _recorded(self, name: str, kind: type[Content]) -> list[Content]:
        found = []
        with contextlib.suppress(NotRegular):
            content = read_regular(self.path, name, max_bytes=_MAX_BYTES[name]) or b""
            for line in content.splitlines():
                with contextlib.suppress(ValidationError):  # torn by a kill
                    found.append(kind.model_validate_json(line))
        return found

    def continue_events_after(self, line: int) -> None:
        """Makes the next event's line start after that offset: lines at earlier offsets count as stored, even
        if another machine's trainer has written them, and this directory lacks them."""
        with append_regular(self.events) as file:
            size = os.fstat(file.fileno()).st_size
            file.write(b"\n" * max(0, line + 1 - size))

    def note_stored(self, url: str) -> None:
        """Notes that the directory was put into that object storage."""
        write_atomically(self.path / _STORED, url)

    def stored_in(self) -> str | None:
        """The object storage that the directory was put into; None if it was not."""
        with contextlib.suppress(NotRegular, OSError):
            content = read_regular(self.path, _STORED, max_bytes=_MAX_BYTES[_STORED])
            return None if content is None else content.decode(errors="replace")
        return None

    def has_reported(self, checkpoint: str) -> bool:
        """Whether an event of any attempt names a checkpoint."""
        name = f'"name":"{checkpoint}"'.encode()
        with (
            contextlib.suppress(FileNotFoundError, NotRegular),
            open_regular(self.path, self.events.name) as file,
        ):
            return any(name in line for line in file)
        return False

    def last_step(self) -> int:
        """The last step that any attempt has reported; 0 if there is none. An attempt that repeats windows
        reports earlier steps again."""
        last, rest = 0, b""
        with (
            contextlib.suppress(FileNotFoundError, NotRegular),
            open_regular(self.path, self.metrics.name) as file,
        ):
            while block := file.read(_MAX_BYTES["log line"]):
                *lines, rest = (rest + block).split(b"\n")
                found = (_STEP.match(line) for line in lines)
                last = max([last, *(int(each[1]) for each in found if each)])
        return last

    def _read(self, name: str, kind: type[Content]) -> Content | None:
        """The content of a file, or None if it does not exist or is not a regular file."""
        with contextlib.suppress(NotRegular):
            content = read_regular(self.path, name, max_bytes=_MAX_BYTES.get(name, MAX_BYTES))
            return None if content is None else kind.model_validate_json(content)
        return None

    def signs_of_work(self) -> tuple[int, int]:
        """The size of all files in the directory, and the sum of the times of their last changes (in ns since
        1970). One of them changes while the trainer works: see `note_work`."""
        size = changed = 0
        for path in islice(_within(self.path, _LOOKED_AT_LEVELS), _MOST_LOOKED_AT):
            with contextlib.suppress(OSError):
                found = path.lstat()
                size, changed = size + found.st_size, changed + found.st_mtime_ns
        return size, changed

    def note_work(self) -> None:
        """Shows that the trainer works, although it may report nothing for long."""
        with contextlib.suppress(OSError):
            (self.path / "at-work").touch()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Shows until the end of the block that the trainer works."""
        ended = threading.Event()

        def note() -> None:
            while not ended.wait(NOTE_WORK_EVERY_SECONDS):
                self.note_work()

        threading.Thread(target=note, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    @contextmanager
    def locked(self, wait_seconds: float = 30.0) -> Iterator[None]:
        """Holds the directory for one trainer; the kernel releases it when the process ends.

        Raises:
            RunDirectoryInUse: another process still holds it after the wait.
            NotRegular: the trainer has put a link or a pipe in the lock's place.
        """
        deadline = time.monotonic() + wait_seconds
        with append_regular(self.path / "lock") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunDirectoryInUse(f"{self.path.name} is held by another trainer") from None
                    time.sleep(0.1)
            yield


def _within(folder: Path, levels: int) -> Iterator[Path]:
    """What is in a folder, and in the folders in it; links are not followed."""
    folders = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
    for inner in folders if levels > 1 else []:
        yield from _within(inner, levels - 1)


def write_atomically(path: Path, content: str) -> None:
    """Replaces a file atomically: even after a power failure, it has either the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    with create_regular(partial) as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns once a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
