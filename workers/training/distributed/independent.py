"""Trains independent replicas: each on its own part of the data, on a device of its own, with its own result.

Each replica is a run of its own in replica-0/, replica-1/ and so on, within the job's run directory, so it
resumes like any other. If there are fewer devices than replicas, they take turns. The job's log has a line
for each step that all replicas have made (or ended before). Needs only the standard library and pydantic.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.contract.assignment import Assignment
from app.contract.plan import RankPlan
from app.contract.reports import EventLine, Failure, LogLine, RankLine, Rewards
from app.contract.spec import Shard
from workers.reporter import Reporter
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.training.distributed.rank_launcher import start_process
from workers.training.exceptions import CannotTrain
from workers.training.reporting.trackers import check_installed

log = logging.getLogger("accrue.trainer")

PART_VARIABLE = "ACCRUE_PART"
"""What a child process does: `replica` trains one of them, `combine` makes the job's result of all."""

_POLL_SECONDS = 0.2
_SECONDS_TO_CLOSE = 10.0
"""How long an interrupted combination may take to close what it writes to."""
_MOST_STEPS_AHEAD = 10_000
"""The maximum number of a replica's steps that are held in memory until the other replicas have made them."""

_SECONDS = ("data_seconds", "forward_backward_seconds", "optimizer_seconds")

_OWN_EVENTS = ("checkpoint", "evaluation", "training", "resumed", "tuned", "skipped")
"""Events from which a job's state is computed: a replica's are forwarded under another type,
except `training` and `checkpoint`, whose data is adapted."""


def replica_folder(run: RunDirectory, number: int) -> RunDirectory:
    return RunDirectory(run.path / f"replica-{number}")


def replicas_of(run: RunDirectory, assignment: Assignment) -> list[RunDirectory]:
    """The run directories of a job's replicas."""
    return [replica_folder(run, number) for number in range(assignment.spec.split.devices)]


def train_replicas(run: RunDirectory, assignment: Assignment, interrupted: Callable[[], bool]) -> int:
    """Trains all replicas, then makes the job's result from theirs.

    Args:
        interrupted: whether an interruption was requested, which is passed on to the replicas.

    Returns:
        The exit status: 0; `INTERRUPTED`; or that of the first process that failed (1 if a signal ended it).
    """
    replicas = replicas_of(run, assignment)
    waiting = [number for number, own in enumerate(replicas) if own.outcome() is None]
    try:
        check_installed(assignment.spec.report_to)  # before hours of training; `combine` writes to them
    except CannotTrain as error:
        run.write_failure(Failure(code=error.code, message=str(error), permanent=True))
        return 1
    with Reporter(run, assignment.attempt) as reporter:
        merged = _Merged(replicas, reporter, len(assignment.plan.ranks), run.last_step())
        status = _Team(run, assignment, replicas, waiting, merged).train(interrupted)
    if status != 0:
        return status
    combine = start_process(run, assignment.plan.ranks[0], assignment.plan.device, {PART_VARIABLE: "combine"})
    try:
        while combine.exitcode is None:
            if interrupted():
                combine.terminate()
                combine.join(_SECONDS_TO_CLOSE)
                return INTERRUPTED
            time.sleep(_POLL_SECONDS)
        return combine.exitcode if combine.exitcode >= 0 else 1
    finally:
        combine.kill()
        combine.join()


def _assignment_of(assignment: Assignment, number: int, rank: RankPlan) -> Assignment:
    """A replica's part of an assignment, on one device."""
    spec, plan = assignment.spec, assignment.plan
    shard = Shard(index=number, count=spec.split.devices)
    completed = spec.completions if number == 0 else 0  # by the base model, which all replicas start from
    own = spec.model_copy(
        update={"strategy": None, "shard": shard, "completions": completed, "report_to": ()}
    )
    alone = rank.model_copy(update={"rank": 0, "share_of_tokens": 1.0})
    return assignment.model_copy(
        update={"spec": own, "plan": plan.model_copy(update={"ranks": (alone,), "strategy": "ddp"})}
    )


@dataclass
class _Team:
    """The replicas' processes."""

    run: RunDirectory
    assignment: Assignment
    replicas: list[RunDirectory]
    waiting: list[int]
    merged: "_Merged"
    running: dict[int, tuple[BaseProcess, RankPlan]] = field(default_factory=dict)

    def train(self, interrupted: Callable[[], bool]) -> int:
        """Runs all replicas to their ends. Returns 0, or the status of the first that failed."""
        try:
            while self.waiting or self.running:
                if interrupted():
                    return self._interrupt()
                self._start_on_free_devices()
                self._pass_on_requests()
                self.merged.update()
                for number, (process, _) in list(self.running.items()):
                    status = process.exitcode
                    if status is None:
                        continue
                    if status != 0:
                        return self._failed(number, status)
                    del self.running[number]
                time.sleep(_POLL_SECONDS)
            self.merged.update()
            return 0
        finally:
            for process, _ in self.running.values():
                process.kill()
            for process, _ in self.running.values():
                process.join()

    def _pass_on_requests(self) -> None:
        """Passes on the supervisor's requests to the replicas."""
        finish, why_cooling_down = self.run.finish_requested(), self.run.why_cooling_down()
        for own in self.replicas:
            if not own.path.exists():
                continue
            if finish:
                own.request_finish()
            if why_cooling_down is None:
                own.end_cooling_down()
            elif own.why_cooling_down() is None:
                own.request_cooling_down(why_cooling_down)

    def _start_on_free_devices(self) -> None:
        used = [rank.gpu_id for _, rank in self.running.values()]
        free = [rank for rank in self.assignment.plan.ranks if rank.gpu_id not in used]
        for rank, number in list(zip(free, self.waiting, strict=False)):
            own = self.replicas[number]
            own.write_assignment(_assignment_of(self.assignment, number, rank))
            kind = self.assignment.plan.device
            self.running[number] = start_process(own, rank, kind, {PART_VARIABLE: "replica"}), rank
            self.waiting.remove(number)

    def _interrupt(self) -> int:
        """Passes a requested interruption on, and waits until all replicas have written their checkpoints;
        the worker kills those that take too long."""
        for process, _ in self.running.values():
            process.terminate()
        while any(process.exitcode is None for process, _ in self.running.values()):
            time.sleep(_POLL_SECONDS)
        self.merged.update()
        return INTERRUPTED

    def _failed(self, number: int, status: int) -> int:
        """Stores a replica's failure as that of the job."""
        self.merged.update()
        found = self.replicas[number].failure()
        if found is not None:
            message = f"replica {number}: {found.message}"
            self.run.write_failure(found.model_copy(update={"message": message}))
        elif status < 0:
            message = f"replica {number} was ended by {signal.Signals(-status).name}"
            self.run.write_failure(Failure(code="trainer_killed", message=message, permanent=False))
        return status if status > 0 else 1


class _Tail:
    """Complete lines that were added to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield line


class _Merged:
    """The replicas' logs and events as one.

    Steps up to the latest one at which every replica has a checkpoint are never repeated, and never reported
    again. Later steps may be repeated, and each attempt reports them.

    Args:
        devices: how many replicas train at the same time.
        reported: the last step that an earlier attempt has reported.
    """

    def __init__(self, replicas: list[RunDirectory], reporter: Reporter, devices: int, reported: int) -> None:
        self._reporter, self._replicas = reporter, replicas
        self._at_once = min(devices, len(replicas))
        self._logs = [_Tail(own.metrics) for own in replicas]
        self._events = [_Tail(own.events) for own in replicas]
        self._lines: list[dict[int, LogLine]] = [{} for _ in replicas]
        self._is_read = [False for _ in replicas]
        """Whether each replica has ended, and its whole log was read after that."""
        self._totals = [_Totals() for _ in replicas]
        self._steps_total = 0
        self._checkpoints = [0] * len(replicas)
        self._read_events()
        self._done = min(reported, *self._checkpoints)

    def update(self) -> None:
        """Reports what is new."""
        self._read_events()
        while self._read_logs() | self._report_steps():  # both: each may make room for the other
            pass

    def _report_steps(self) -> bool:
        """Reports the steps of which all lines are known. Returns whether there was any."""
        before = self._done
        while (own := self._complete(self._done + 1)) is not None:
            self._done += 1
            self._reporter.step(self._combined(self._done, own))
            for lines, totals in zip(self._lines, self._totals, strict=True):
                lines.pop(self._done, None)
                totals.forget(self._done)
        return self._done > before

    def _read_logs(self) -> bool:
        """Reads new lines of the logs; of a log that is far ahead, only some. Returns whether there were
        any."""
        found = False
        for number, (tail, lines, totals) in enumerate(
            zip(self._logs, self._lines, self._totals, strict=True)
        ):
            has_ended = self._replicas[number].outcome() is not None  # looked up before its log is read
            for raw in tail.lines() if len(lines) < _MOST_STEPS_AHEAD else ():
                found = True
                line = _parsed(raw)
                if line is not None and totals.add(line) and line.step > self._done:
                    lines[line.step] = line
                if len(lines) >= _MOST_STEPS_AHEAD:
                    break
            self._is_read[number] = has_ended and len(lines) < _MOST_STEPS_AHEAD
        return found

    def _read_events(self) -> None:
        for number, tail in enumerate(self._events):
            for raw in tail.lines():
                self._take_event(number, raw)

    def _complete(self, step: int) -> dict[int, LogLine] | None:
        """Each replica's line of a step, if all that are still training have made it."""
        own = {number: lines[step] for number, lines in enumerate(self._lines) if step in lines}
        missing = [number for number in range(len(self._replicas)) if number not in own]
        if not own or not all(self._is_read[number] for number in missing):
            return None
        return own

    def _combined(self, step: int, own: dict[int, LogLine]) -> LogLine:
        lines = list(own.values())
        tokens = sum(line.tokens for line in lines)

        def mean(values: Iterable[float]) -> float:
            found = list(values)
            return sum(found) / len(found)

        auxiliary = [(line.aux_loss, line.samples) for line in lines if line.aux_loss is not None]
        rewards = [(line.rewards, line.samples) for line in lines if line.rewards is not None]
        weights = [line.samples if rewards else line.tokens for line in lines]
        share = min(1.0, self._at_once / len(lines))
        ranks = tuple(self._totals[number].of(number, line) for number, line in own.items())
        memory = [line.memory_gb for line in lines if line.memory_gb is not None]
        peaks = [line.peak_gb for line in lines if line.peak_gb is not None]
        reserved = [line.reserved_gb for line in lines if line.reserved_gb is not None]
        return lines[0].model_copy(
            update={
                "attempt": self._reporter.attempt,
                "micro_step": sum(line.micro_step for line in lines),
                "samples": sum(line.samples for line in lines),
                "loss": _mean([(line.loss, weight) for line, weight in zip(lines, weights, strict=True)])
                or 0.0,
                "loss_ema": mean(line.loss_ema for line in lines),
                "grad_norm": mean(line.grad_norm for line in lines),
                "tokens": tokens,
                "input_tokens": sum(line.input_tokens for line in lines),
                "padded_tokens": sum(line.padded_tokens for line in lines),
                "tokens_per_second": share * sum(line.tokens_per_second for line in lines),
                **{name: sum(getattr(line, name) for line in lines) / self._at_once for name in _SECONDS},
                "memory_gb": max(memory, default=None),
                "peak_gb": max(peaks, default=None),
                "reserved_gb": max(reserved, default=None),
                "aux_loss": _mean(auxiliary),
                "rewards": _mean_rewards(rewards),
                "largest_tokens": max((line.largest_tokens or 0 for line in lines), default=0) or None,
                "noise_scale": None,
                "skipped": sum(line.skipped for line in lines),
                "time": max(line.time for line in lines),
                "micro_losses": None,
                "gradient_norms": None,
                "ranks": ranks,
            }
        )

    def _take_event(self, number: int, raw: bytes) -> None:
        """Takes an event into account, and forwards it, unless an earlier attempt has done so."""
        try:
            event = EventLine.model_validate_json(raw)
        except ValidationError:
            return
        if event.type == "training":
            self._steps_total = max(self._steps_total, _whole(event.data.get("steps_total")))
        if event.type == "checkpoint":
            self._checkpoints[number] = max(self._checkpoints[number], _whole(event.data.get("step")))
        if event.attempt == self._reporter.attempt:
            self._forward(number, event)

    def _forward(self, number: int, event: EventLine) -> None:
        kind, data = event.type, {**event.data, "replica": number}
        if kind == "training":
            data["steps_total"] = self._steps_total
        elif kind == "checkpoint":
            data["progress"] = sum(self._checkpoints)
        elif kind in _OWN_EVENTS:
            kind = f"replica_{kind}"
        self._reporter.event(kind, f"Replica {number}: {event.message}", event.level, **data)


class _Totals:
    """What a replica has done up to each of its steps; a step that is repeated counts once."""

    def __init__(self) -> None:
        self._up_to: dict[int, tuple[int, int, float]] = {0: (0, 0, 0.0)}
        self._first = 0

    def add(self, line: LogLine) -> bool:
        """Takes a step into account; those before it were added earlier. Returns whether it is one of the
        steps that are still remembered."""
        before = self._up_to.get(line.step - 1)
        if before is None:
            return False
        micro_batches, tokens, seconds = before
        self._up_to[line.step] = (
            micro_batches + line.gradient_accumulation_steps,
            tokens + line.input_tokens,
            seconds + _seconds(line),
        )
        return True

    def forget(self, until: int) -> None:
        """Forgets the steps before one that is never repeated."""
        for step in range(self._first, until):
            self._up_to.pop(step, None)
        self._first = max(self._first, until)

    def of(self, number: int, line: LogLine) -> RankLine:
        """The replica's part of the job's line of a step."""
        micro_batches, tokens, seconds = self._up_to[line.step]
        return RankLine(
            rank=number,
            micro_batches=line.gradient_accumulation_steps,
            samples=line.samples,
            tokens=line.input_tokens,
            seconds=_seconds(line),
            idle_seconds=0.0,
            peak_gb=line.peak_gb,
            total_micro_batches=micro_batches,
            total_tokens=tokens,
            total_seconds=seconds,
            total_idle_seconds=0.0,
        )


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    """The mean of values with their weights; None without any."""
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else None


def _mean_rewards(weighted: Sequence[tuple[Rewards, int]]) -> Rewards | None:
    """The mean of each measurement over the replicas that have it."""
    if not weighted:
        return None
    own = [(rewards.model_dump(), weight) for rewards, weight in weighted]
    means = {
        name: _mean([(each[name], weight) for each, weight in own if each[name] is not None])
        for name in Rewards.model_fields
    }
    return Rewards.model_validate(means)


def _seconds(line: LogLine) -> float:
    return line.data_seconds + line.forward_backward_seconds


def _parsed(raw: bytes) -> LogLine | None:
    try:
        return LogLine.model_validate_json(raw)
    except ValidationError:
        return None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
