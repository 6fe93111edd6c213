"""Appends what a trainer reports to its run directory."""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from app.contract.fail_points import fail_point
from app.contract.reports import EventLine, Level, LogLine, WindowProgress
from workers.run_directory import NOTE_WORK_EVERY_SECONDS, RunDirectory

PROGRESS_EVERY_SECONDS = 1.0


class Reporter:
    """Appends a trainer's lines; each reaches the kernel before the next is made."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        self.attempt = attempt
        self._run = run
        self._progress_at = self._worked_at = time.monotonic()
        self._metrics = _Appended(run.metrics)
        self._events = _Appended(run.events)

    def step(self, line: LogLine) -> None:
        fail_point("trainer.stepping")
        self._metrics.append(line)
        fail_point("trainer.stepped")

    def event(self, kind: str, message: str, level: Level = "info", **data: Any) -> None:
        self._events.append(
            EventLine(
                attempt=self.attempt, time=time.time(), type=kind, level=level, message=message, data=data
            )
        )

    def begin_window(self) -> None:
        """Progress within the window is reported from a second after this moment."""
        self._progress_at = time.monotonic()

    def progress(self, step: int, micro_step: int, accumulation_step: int) -> None:
        """Reports the progress within the current window, at most once a second.

        Args:
            micro_step: the run's micro-steps before this window.
        """
        if not self._is_due():
            return
        self._run.write_progress(
            WindowProgress(
                attempt=self.attempt,
                step=step,
                micro_step=micro_step + accumulation_step,
                accumulation_step=accumulation_step,
            )
        )

    def preparing(self, done: int, total: int) -> None:
        """Reports how many samples are tokenised or, after that, scored by the reference model; at most once
        a second."""
        if self._is_due():
            prepared = {"prepared_samples": min(done, total), "samples_to_prepare": total}
            self._run.write_progress(
                WindowProgress(attempt=self.attempt, step=0, micro_step=0, accumulation_step=0, **prepared)
            )

    def _is_due(self) -> bool:
        """Whether a second has passed since the last report of progress."""
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_SECONDS:
            return False
        self._progress_at = now
        return True

    def note_work(self) -> None:
        """Marks the trainer as working, at most once per interval."""
        now = time.monotonic()
        if now - self._worked_at >= NOTE_WORK_EVERY_SECONDS:
            self._worked_at = now
            self._run.note_work()

    def sync(self) -> None:
        """Returns once every line so far is on the disk."""
        self._metrics.sync()
        self._events.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._events.close()


class SilentReporter(Reporter):
    """The reporter of every rank but the first, which reports for all of them."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    def step(self, line: LogLine) -> None:
        """Rank 0 reports it."""

    def event(self, kind: str, message: str, level: Level = "info", **data: Any) -> None:
        """Rank 0 reports it."""

    def begin_window(self) -> None:
        """Rank 0 reports it."""

    def progress(self, step: int, micro_step: int, accumulation_step: int) -> None:
        """Rank 0 reports its own."""

    def preparing(self, done: int, total: int) -> None:
        """Rank 0 prepares the data for all."""

    def note_work(self) -> None:
        """Rank 0 shows it."""

    def sync(self) -> None:
        """There is nothing to sync."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""


class _Appended:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        if self._file.tell() and not _ends_a_line(path):
            self._file.write(b"\n")  # what a killed attempt left half written stays a line of its own

    def append(self, line: BaseModel) -> None:
        self._file.write(line.model_dump_json().encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
