"""Turns the lines of a run directory into rows: lines may be read again, and are stored once."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from app.contract.regular_files import open_regular
from app.contract.reports import EventLine, LogLine, WindowProgress, is_usable
from app.contract.text import storable, storable_values
from app.jobs import queue
from app.jobs.events import next_id
from app.jobs.transitions import Fence
from app.storage.compiled import CompiledStatement
from app.storage.session import Session
from app.storage.tables import JobEvent, StepMetric
from workers.run_directory import RunDirectory

_ALL = TypeAdapter(list[LogLine])
_READ_AT_ONCE = 2**18
"""Bytes per read. Larger reads are a third slower: the garbage collector walks the pending rows
repeatedly."""

_EMPTY_LINES = re.compile(rb"\n+")
_MAX_LINES_PER_READ = 5000
"""The maximum lines per read: even an empty line takes time, and other writers wait for the transaction."""

_MAX_LINE_BYTES = 2**20
"""Bytes of a log line or an event; our trainer writes far less."""

_MAX_EVENT_BYTES = 2**26
"""The maximum size of all events of a job; further events are not stored."""

_SECONDS_AT_ONCE = 0.1
"""The caller commits after this time, so that a long log is read in many short transactions."""

_NEW_SECONDS = 10.0
"""Older lines get no GPU temperature: the temperature at their time is unknown."""

_GIB = 2**30


@dataclass(frozen=True)
class Sums:
    """Sums over the rows of a job up to a step."""

    step: int
    steps: int
    samples: int
    tokens: int
    seconds: float

    def with_line(self, line: LogLine) -> "Sums":
        """These sums and one more step."""
        took = line.data_seconds + line.forward_backward_seconds + line.optimizer_seconds
        took += line.synchronise_seconds or 0.0
        return Sums(
            line.step, self.steps + 1, self.samples + line.samples, self.tokens + line.tokens,
            self.seconds + took,
        )  # fmt: skip


@dataclass(frozen=True)
class Position:
    """How far a run's lines have been read, with sums over them."""

    metrics: int = 0
    events: int = 0
    steps_total: int | None = None
    checkpoint_step: int = 0
    skipped: int = 0
    tuning: dict[str, Any] | None = None
    """What this attempt measured of micro-batch sizes (app.contract.reports.Tuning)."""
    sums: Sums | None = None
    """The sums so far, or None if they must be recomputed."""
    window: WindowProgress | None = None
    caught_up: bool = True
    """Whether all available lines have been read."""


def ingest(
    session: Session,
    run: RunDirectory,
    fence: Fence,
    position: Position,
    temperature_celsius: float | None = None,
) -> Position:
    """Stores what the trainer has written since `position`.

    Args:
        temperature_celsius: the current temperature of the trainer's GPU, stored with the newest steps.

    Returns:
        The new position, valid once the caller's transaction is committed; after a rollback, the old one is
        valid.

    Raises:
        transitions.LostJob: the job no longer belongs to this worker; nothing is stored.
    """
    before, caught_up = replace(position, caught_up=True), False
    until = time.monotonic() + _SECONDS_AT_ONCE
    while True:
        events, at_events = _new_events(run, position.events)
        made, at_metrics = _new_lines(run.metrics, position.metrics)
        if (at_events, at_metrics) == (position.events, position.metrics):
            caught_up = True
            break
        queue.lock_job(session, fence)
        position, stopped_at = _store_events(session, fence, events, position, until)
        if stopped_at is not None:
            position = replace(position, events=stopped_at)
            break
        position = replace(position, events=at_events)
        lines = _with_temperature(_log_lines([raw for _, raw in made]), temperature_celsius)
        _store_metrics(session, fence.job_id, lines)
        sums = _summed(session, fence.job_id, position.sums, lines)
        position = replace(position, metrics=at_metrics, sums=sums)
        if time.monotonic() >= until:
            break
    window = None
    with contextlib.suppress(ValidationError):
        window = run.progress()
    if window is not None and window.attempt == fence.attempt:
        position = replace(position, window=window)
    position = replace(position, caught_up=True)
    if position != before:
        progress = _progress(session, fence.job_id, position)
        queue.note_progress(session, fence, progress, position.checkpoint_step)
    return replace(position, caught_up=caught_up)


def forget_steps_after(session: Session, fence: Fence, position: Position, last: int) -> None:
    """Removes the stored log lines of steps after the last step of the job's model.

    There are such lines if an earlier attempt made more steps than the last one: the last attempt continued
    from a checkpoint before those steps, and a user stopped it before it had repeated them.

    Args:
        position: how far the run's lines have been read.
    """
    of_later_steps = delete(StepMetric).where(StepMetric.job_id == fence.job_id, StepMetric.step > last)
    if session.execute(of_later_steps.returning(StepMetric.step)).first() is not None:
        progress = _progress(session, fence.job_id, replace(position, sums=None, window=None))
        queue.note_progress(session, fence, progress, position.checkpoint_step)


def _with_temperature(lines: list[LogLine], temperature_celsius: float | None) -> list[LogLine]:
    """Adds the GPU's temperature to new lines."""
    if temperature_celsius is None:
        return lines
    since = time.time() - _NEW_SECONDS
    own = {"temperature_celsius": temperature_celsius}
    return [line.model_copy(update=own) if line.time > since else line for line in lines]


def _summed(session: Session, job_id: str, sums: Sums | None, lines: list[LogLine]) -> Sums | None:
    """Adds new lines to the sums. If a later attempt repeats steps, the sums before them are recomputed from
    the rows, so that each step counts once."""
    for line in lines:
        if sums is None or line.step != sums.step + 1:
            sums = _sums_before(session, job_id, line.step)
        sums = sums.with_line(line)
    return sums


def _sums_before(session: Session, job_id: str, step: int) -> Sums:
    seconds = StepMetric.data_seconds + StepMetric.forward_backward_seconds + StepMetric.optimizer_seconds
    seconds += func.coalesce(StepMetric.synchronise_seconds, 0.0)
    row = session.execute(
        select(
            func.count(), func.coalesce(func.sum(StepMetric.samples), 0),
            func.coalesce(func.sum(StepMetric.tokens), 0), func.coalesce(func.sum(seconds), 0.0),
        ).where(StepMetric.job_id == job_id, StepMetric.step < step)
    ).one()  # fmt: skip
    return Sums(step - 1, row[0], int(row[1]), int(row[2]), float(row[3]))


def _store_events(
    session: Session, fence: Fence, lines: list[tuple[int, bytes]], position: Position, until: float
) -> tuple[Position, int | None]:
    """Stores events until the given monotonic time. Returns the new position, and the offset of the first
    event that was left, or None if there is none."""
    for number, (offset, raw) in enumerate(lines):
        if number and offset < _MAX_EVENT_BYTES and time.monotonic() >= until:
            return position, offset
        try:
            event = EventLine.model_validate_json(raw)
        except ValidationError:
            continue  # torn by a kill
        if not is_usable(event.type, event.data):
            continue
        if event.type == "training":
            position = replace(position, steps_total=_count(event.data.get("steps_total")))
        if event.type == "checkpoint":
            progress = event.data.get("progress", event.data.get("step"))  # of replicas: of all together
            step = max(position.checkpoint_step, _count(progress) or 0)
            position = replace(position, checkpoint_step=step)
        if event.type == "tuned" and event.attempt == fence.attempt:
            position = replace(position, tuning=event.data)
        if event.type == "skipped":
            position = replace(position, skipped=_count(event.data.get("skipped")) or 0)
        _store_event(session, fence.job_id, offset, event)
    return position, None


def _count(value: Any) -> int | None:
    """The value if it is a valid number of steps or windows, or else None."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 2**31 else None


def _progress(session: Session, job_id: str, position: Position) -> dict[str, Any]:
    last = session.scalars(
        select(StepMetric).where(StepMetric.job_id == job_id).order_by(StepMetric.step.desc()).limit(1)
    ).one_or_none()
    steps_total = position.steps_total
    if last is None:
        started = {"steps_total": steps_total, "skipped": position.skipped}
        if position.window is None:
            return started
        own = position.window
        if own.samples_to_prepare is not None:
            prepared = {"prepared_samples": own.prepared_samples}
            return {**started, **prepared, "samples_to_prepare": own.samples_to_prepare}
        started |= {"micro_step": own.micro_step, "accumulation_step": own.accumulation_step}
        return {**started, "within_window": True}
    sums = position.sums
    if sums is None or sums.step != last.step:
        sums = _sums_before(session, job_id, last.step + 1)
    window = position.window
    within = window is not None and window.step == last.step
    left = max(0, (steps_total or last.step) - last.step)
    return {
        "step": last.step,
        "steps_total": steps_total,
        "micro_step": window.micro_step if within and window else last.micro_step,
        "accumulation_step": window.accumulation_step
        if within and window
        else last.gradient_accumulation_steps,
        "within_window": within,
        "skipped": max(last.skipped, position.skipped),
        "epoch": last.epoch,
        "samples_seen": sums.samples,
        "tokens_seen": sums.tokens,
        "loss": last.loss,
        "loss_ema": last.loss_ema,
        "learning_rate": last.learning_rate,
        "grad_norm": last.grad_norm,
        "tokens_per_second": last.tokens_per_second,
        "memory_peak_bytes": int(last.peak_gb * _GIB) if last.peak_gb is not None else None,
        "eta_seconds": round(left * sums.seconds / max(1, sums.steps), 1),
        "ranks": last.ranks,
    }


def _new_events(run: RunDirectory, offset: int) -> tuple[list[tuple[int, bytes]], int]:
    """New lines of events; once the maximum that is stored is reached, also an event that says so."""
    if offset >= _MAX_EVENT_BYTES:
        return [], offset
    lines, end = _new_lines(run.events, offset)
    if end >= _MAX_EVENT_BYTES:
        most = f"{_MAX_EVENT_BYTES // 2**20} MiB"
        message = f"The job has reported more than {most} of events: further ones are not stored."
        last = EventLine(
            attempt=0, time=time.time(), type="too_many_events", level="warning", message=message, data={}
        )
        lines.append((end, last.model_dump_json().encode()))
    return lines, end


def _new_lines(path: Path, offset: int) -> tuple[list[tuple[int, bytes]], int]:
    """Complete lines after an offset, each with its own offset, and the offset after the last of them."""
    try:
        opened = open_regular(path.parent, path.name)
    except FileNotFoundError:
        return [], offset
    with opened as file:
        file.seek(offset)
        content = file.read(_READ_AT_ONCE)
        if b"\n" not in content:  # one line longer than what is read at once
            content += file.read(_MAX_LINE_BYTES)
            if len(content) > _MAX_LINE_BYTES and b"\n" not in content:
                raise ValueError(f"a line of {path.name} is longer than {_MAX_LINE_BYTES} bytes")
            content = content[: content.find(b"\n") + 1]
    end = content.rfind(b"\n") + 1
    lines = list(islice(_with_offsets(content[:end], offset), _MAX_LINES_PER_READ))
    if len(lines) == _MAX_LINES_PER_READ:
        end = lines[-1][0] + len(lines[-1][1]) - offset
    return [(at, line) for at, line in lines if not line.isspace()], offset + end


def _with_offsets(content: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Lines with their offsets; consecutive empty lines count as one line."""
    at = 0
    while at < len(content):
        after = content.find(b"\n", at) + 1
        if after == at + 1:  # empty
            after = _EMPTY_LINES.match(content, at).end()  # type: ignore[union-attr]  # there is at least one newline
        yield offset + at, content[at:after]
        at = after


def _log_lines(raw: list[bytes]) -> list[LogLine]:
    """Parses the complete lines. A line torn by a kill is skipped; the next attempt repeats its step."""
    with contextlib.suppress(ValidationError):
        return _ALL.validate_json(b"[" + b",".join(raw) + b"]")
    lines = []
    for each in raw:
        with contextlib.suppress(ValidationError):
            lines.append(LogLine.model_validate_json(each))
    return lines


def _store_metrics(session: Session, job_id: str, lines: list[LogLine]) -> None:
    """Stores one row per step; if two attempts made the step, the later attempt's."""
    by_step: dict[int, LogLine] = {}
    for line in lines:
        if line.step not in by_step or line.attempt >= by_step[line.step].attempt:
            by_step[line.step] = line
    if not by_step:
        return
    _UPSERT.run_for_each(session, (_row(job_id, line) for line in by_step.values()))


def _row(job_id: str, line: LogLine) -> dict[str, Any]:
    row = {**vars(line), "job_id": job_id}
    row["ranks"] = line.ranks and [vars(rank) for rank in line.ranks]
    row["rewards"] = line.rewards and vars(line.rewards)
    for name in ("micro_losses", "gradient_norms", "ranks", "rewards"):
        row[name] = None if row[name] is None else json.dumps(row[name])
    return row


def _upsert(dialect: str) -> Any:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(StepMetric.__table__)
    update = {name: insert.excluded[name] for name in LogLine.model_fields if name != "step"}
    return insert.on_conflict_do_update(
        index_elements=["job_id", "step"],
        set_=update,
        where=insert.excluded.attempt >= StepMetric.__table__.c.attempt,
    )


_UPSERT = CompiledStatement(_upsert, ["job_id", *LogLine.model_fields])


def _insert_event(dialect: str) -> Any:
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(JobEvent.__table__)
    return insert.on_conflict_do_nothing(
        index_elements=["job_id", "line"], index_where=JobEvent.line.is_not(None)
    )


_INSERT_EVENT = CompiledStatement(_insert_event, [column.name for column in JobEvent.__table__.columns])


def _store_event(session: Session, job_id: str, offset: int, event: EventLine) -> None:
    _INSERT_EVENT.run(
        session,
        {
            "id": next_id(session, job_id),
            "job_id": job_id,
            "line": offset,
            "attempt": event.attempt,
            "created_at": event.time,
            "level": event.level,
            "type": event.type,
            "message": storable(event.message),
            "data": json.dumps(storable_values(event.data)),
        },
    )
