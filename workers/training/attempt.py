"""One attempt at one job, in this process (`__main__.py` lists the exit statuses)."""

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from app.contract.reports import Failure
from workers.reporter import Reporter, SilentReporter
from workers.run_directory import (
    DISK_FULL,
    DISK_FULL_FAILURE,
    HIDDEN_VARIABLE,
    IN_USE,
    INTERRUPTED,
    LOST_RANK,
    RANKS_MUST_RESTART,
    TOKEN_VARIABLE,
    RunDirectory,
    RunDirectoryInUse,
)
from workers.training.devices.lost_device import is_device_lost
from workers.training.distributed.independent import PART_VARIABLE, train_replicas
from workers.training.distributed.rank_launcher import (
    RENDEZVOUS_VARIABLE,
    first_rank,
    has_other_nodes,
    launch,
)
from workers.training.exceptions import CannotTrain, Interrupted, LostRank, RanksMustRestart
from workers.training.models.fetching import fetch, fetch_in_child, is_transient, why_not_loaded
from workers.training.processes.filesystem_view import drop_capabilities, isolate
from workers.training.processes.lifeline import die_with_parent, end_with_supervisor, inherited
from workers.training.processes.limits import limit
from workers.training.processes.preloading import preload
from workers.training.processes.process_tree import run_sandboxed

log = logging.getLogger("accrue.trainer")


_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""What PyTorch says of an operation that deterministic algorithms exclude, after the operation's name."""


class InterruptSignal:
    """True once SIGTERM or SIGINT has come; the run then ends at the next micro-batch.

    Args:
        ends_early: end this process at once if the signal comes before the run asks for the first time: it
            is still loading libraries, which can take long, and has done nothing yet.
    """

    def __init__(self, *, ends_early: bool = False) -> None:
        self.received = False
        self._ends_early = ends_early
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._ends_early:
            os._exit(INTERRUPTED)

    def __call__(self) -> bool:
        self._ends_early = False
        return self.received


def train(run: RunDirectory) -> int:
    """Trains in a run directory, as the environment says: a whole job, one of its ranks, or one of its parts.

    Call it once in a process, from its only thread.

    Returns:
        The exit status.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    limit()
    is_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1
    interrupted = InterruptSignal(ends_early=is_rank)
    if is_rank:
        _end_at_once(_as_rank(run, interrupted))
    if (part := os.environ.get(PART_VARIABLE)) is not None:
        return _as_part(run, interrupted, part)
    isolated = bool(os.environ.get(HIDDEN_VARIABLE))
    by_worker = TOKEN_VARIABLE in os.environ  # a pipe that the processes of the sandbox do not inherit
    if (isolated or by_worker) and (status := fetch_in_child(lambda: _fetch(run))) != 0:
        return status

    def work(has_namespaces: bool) -> int:
        if has_namespaces:
            isolate(run.path)
        elif isolated:
            drop_capabilities()
        die_with_parent()  # again: dropping capabilities clears this setting
        try:
            with contextlib.nullcontext() if first_rank() else run.locked():
                assignment = run.assignment()
                plan = assignment.plan
                if assignment.spec.strategy == "independent":
                    return train_replicas(run, assignment, interrupted)
                if len(plan.ranks) > 1:
                    return launch(run, plan.ranks, plan.device, interrupted)
                return attempt(run, interrupted)
        except RunDirectoryInUse as error:
            log.error("%s", error)
            return IN_USE  # no fault of the job's: another attempt is about to end
        except OSError as error:  # of the process that watches over ranks or replicas
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return DISK_FULL

    return run_sandboxed(work, isolated=isolated, lifeline=inherited())


def _end_at_once(status: int) -> NoReturn:
    """Ends this process without Python's finalisation, in which threads of torch.distributed that have not
    ended yet can abort it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _as_rank(run: RunDirectory, interrupted: InterruptSignal) -> int:
    """Runs one of several ranks, started by the launcher or by torchrun."""
    rank = int(os.environ["RANK"])
    launched = RENDEZVOUS_VARIABLE in os.environ or has_other_nodes()
    if launched:
        _sandbox_again()
    with contextlib.nullcontext() if launched or rank else run.locked():
        return attempt(run, interrupted, rank, int(os.environ["WORLD_SIZE"]))


def _as_part(run: RunDirectory, interrupted: InterruptSignal, part: str) -> int:
    """Trains one of a job's independent replicas, or combines them."""
    _sandbox_again()
    if part == "combine":
        return _report_end(run, interrupted, _combine)
    with run.locked():
        return attempt(run, interrupted)


def _sandbox_again() -> None:
    """Drops the capabilities again, which a program may regain when it is executed, and sets the parent-death
    signal, which no new process inherits."""
    if os.environ.get(HIDDEN_VARIABLE):
        drop_capabilities()
    die_with_parent()


def _combine(reporter: Reporter, run: RunDirectory, interrupted: InterruptSignal) -> None:
    from workers.training.distributed.combine import combine

    run.write_outcome(combine(run, reporter, interrupted))


def _fetch(run: RunDirectory) -> int:
    """Fetches the base model's files where the trainer can read them, since it can write only to its run
    directory."""
    end_with_supervisor()
    assignment = run.assignment()
    try:
        with run.at_work():  # nothing is reported during a download
            fetch(assignment.spec.model, assignment.model_path)
    except Exception as error:
        known = isinstance(error, (OSError, ValueError, ImportError)) or is_transient(error)
        if not known:
            log.exception("the download failed")
        first = why_not_loaded(error, assignment, run.base) if known else "the hub's answers cannot be read"
        message = f"the model {assignment.spec.model.name} could not be loaded: {first}"
        failure = Failure(code="model_not_loaded", message=message, permanent=not is_transient(error))
        run.write_failure(failure)
        return 1
    return 0


def attempt(run: RunDirectory, interrupted: InterruptSignal, rank: int = 0, size: int = 1) -> int:
    """Runs one attempt, or one rank of it, and writes its result to the run directory."""

    def train_here(reporter: Reporter, run: RunDirectory, interrupted: InterruptSignal) -> None:
        preload()
        from workers.training.distributed.group import connect
        from workers.training.fit import fit

        assignment = run.assignment()
        with connect(assignment.plan, rank, size) as group:
            outcome = fit(run, assignment, reporter, interrupted, group)
        if rank == 0:
            run.write_outcome(outcome)

    return _report_end(run, interrupted, train_here, rank)


Work = Callable[[Reporter, RunDirectory, InterruptSignal], None]


def _report_end(run: RunDirectory, interrupted: InterruptSignal, work: Work, rank: int = 0) -> int:
    """Runs work to its end, and reports a failure in the run directory. Returns the exit status."""
    number = run.assignment().attempt
    with SilentReporter(number) if rank else Reporter(run, number) as reporter:
        try:
            work(reporter, run, interrupted)
        except Interrupted:
            reporter.event(
                "interrupted", "Training was interrupted: the next attempt continues from what was saved."
            )
            return INTERRUPTED
        except CannotTrain as error:
            run.write_failure(Failure(code=error.code, message=str(error), permanent=True), rank)
            return 1
        except RanksMustRestart as error:
            log.warning("%s", error)
            return RANKS_MUST_RESTART
        except LostRank as error:
            log.error("rank %d lost another rank: %s", rank, error)
            return LOST_RANK
        except Exception as error:
            log.exception("the attempt failed")
            failure = _crash(error, run)
            with contextlib.suppress(OSError):
                run.write_failure(failure, rank)
            return DISK_FULL if failure.code == "disk_full" else 1
    return 0


def _crash(error: Exception, run: RunDirectory) -> Failure:
    """The kind of error and its first line; the full error is in trainer.log, which no response shows."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DISK_FULL_FAILURE
        first = os.strerror(error.errno) if error.errno else "system error"  # its own text may name paths
    else:
        first = (str(error).strip().splitlines() or [""])[0][:300]
        first = first.replace(str(run.path.parent.parent), "data").replace(str(Path.cwd()), ".")
    if isinstance(error, RuntimeError) and _NOT_DETERMINISTIC in first:
        operation = first.split(_NOT_DETERMINISTIC)[0].strip()
        message = (
            f"this model cannot be trained with deterministic: true on a GPU: {operation} gives other bits "
            "each time. Leave deterministic out: a resume then equals an uninterrupted run up to rounding"
        )
        return Failure(code="not_deterministic", message=message, permanent=True)
    lost = isinstance(error, RuntimeError) and is_device_lost(first)
    code = "device_lost" if lost else "trainer_crashed"
    return Failure(code=code, message=f"{type(error).__name__}: {first}", permanent=False)
