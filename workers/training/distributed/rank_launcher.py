"""Starts a process for each of a run's ranks on this node, and ends all of them as soon as one fails.

On a single node, ranks find each other by a file that only their user can read, and are started again if they
ran out of memory. With several nodes, they use MASTER_ADDR and MASTER_PORT, and the worker launches all nodes
again (executors/remote_trainer.py). After any other failure, a worker claims the job again.

This module needs only the standard library and pydantic. If the libraries are loaded in this process all the
same, because a fork server started it, the ranks are copies of it, which share their memory (preloading.py).
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from app.contract.plan import RankPlan
from app.contract.reports import Failure
from workers.run_directory import (
    GPU_NAMES_VARIABLE,
    INTERRUPTED,
    LOST_RANK,
    RANKS_MUST_RESTART,
    RunDirectory,
)
from workers.training.processes.preloading import become_trainer, forking

log = logging.getLogger("accrue.trainer")

RENDEZVOUS_VARIABLE = "ACCRUE_RENDEZVOUS_FILE"
"""The file through which ranks find each other. Without it, ranks find each other by torchrun's variables
(MASTER_ADDR and others)."""

FIRST_RANK_VARIABLE, RANKS_HERE_VARIABLE = "ACCRUE_FIRST_RANK", "ACCRUE_RANKS_HERE"
"""The first rank on this node, and the number of ranks here, if a run has several nodes. Their ranks find
each other by MASTER_ADDR and MASTER_PORT."""

_MOST_STARTS = 30
"""The job fails once all ranks have been started as often as this times the number of ranks, and some rank
ran out of memory each time. Each restart uses smaller micro-batches on some rank, so a few are enough."""

_POLL_SECONDS = 0.05

_CAUSE_SECONDS = 2.0
"""After one rank has ended with an error, the launcher waits this long for the others, because the rank that
failed first may be the last to end."""

_STOP_SECONDS = 10.0
"""After an interruption, the first rank ends once the checkpoint is written; the others have this long."""

_FROZEN_SECONDS = 5.0
"""A rank that was stopped by a signal for this long is lost, since all other ranks wait for it."""


def has_other_nodes() -> bool:
    """Whether some of the run's ranks are on other nodes."""
    return FIRST_RANK_VARIABLE in os.environ


def first_rank() -> int:
    """The first of the ranks on this node."""
    return int(os.environ.get(FIRST_RANK_VARIABLE, "0"))


def launch(run: RunDirectory, ranks: tuple[RankPlan, ...], kind: str, interrupted: Callable[[], bool]) -> int:
    """Runs a trainer for each rank of this node, until all of them have ended.

    Args:
        kind: the kind of the devices: "cpu" or "cuda".
        interrupted: whether an interruption was requested, which is passed on to the ranks.

    Returns:
        The exit status: that of the rank that failed first; 0 if all succeeded.
    """
    most = _MOST_STARTS * len(ranks)
    for _ in range(most):
        status = _launch_once(run, ranks, kind, interrupted)
        if status != RANKS_MUST_RESTART or has_other_nodes():
            return status
        log.warning("all ranks start again from the last checkpoint")
    message = f"the ranks ran out of memory {most} times: use ddp, more devices, or a smaller max_length"
    run.write_failure(Failure(code="out_of_memory", message=message, permanent=True))
    return 1


def _launch_once(
    run: RunDirectory, ranks: tuple[RankPlan, ...], kind: str, interrupted: Callable[[], bool]
) -> int:
    first = first_rank()
    here = ranks[first : first + int(os.environ.get(RANKS_HERE_VARIABLE, len(ranks)))]
    for rank in here:
        _failure_file(run, rank.rank).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=run.path) as private:
        shared = {"WORLD_SIZE": str(len(ranks))}
        if not has_other_nodes():
            shared |= {
                RENDEZVOUS_VARIABLE: f"{private}/rendezvous",
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
            }
        started = [start_process(run, rank, kind, {**shared, "RANK": str(rank.rank)}) for rank in here]
        try:
            return _watch(run, started, interrupted, first)
        finally:
            _kill(started)


def start_process(run: RunDirectory, rank: RankPlan, kind: str, variables: Mapping[str, str]) -> BaseProcess:
    """Starts a trainer on a rank's device, in a child process.

    Args:
        kind: the kind of the device: "cpu" or "cuda".
        variables: further environment variables.
    """
    names = dict(name.split("=", 1) for name in os.environ.get(GPU_NAMES_VARIABLE, "").split(",") if name)
    visible = names.get(str(rank.gpu_id), str(rank.gpu_id)) if kind == "cuda" else ""
    environment = {**os.environ, **variables, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible}
    started = multiprocessing.get_context("fork").Process(
        target=become_trainer, args=(run.path, environment), kwargs={"name": f"trainer rank {rank.rank}"}
    )
    with forking():
        started.start()
    return started


def _watch(run: RunDirectory, ranks: list[BaseProcess], interrupted: Callable[[], bool], first: int) -> int:
    """Waits for the ranks (`first` is the number of the first one); after the first failure, ends the
    others and returns its status."""
    frozen_since: dict[int, float] = {}
    stopped = False
    while True:
        statuses = [rank.exitcode for rank in ranks]
        if all(status == 0 for status in statuses):
            return 0
        if (stopped or interrupted()) and -signal.SIGTERM in statuses:
            return INTERRUPTED  # it was so early that the rank could not note the request yet
        if any(statuses):
            return _end_after_failure(run, ranks, first)
        if interrupted() and not stopped:
            stopped = True
            for rank in ranks:
                rank.terminate()
        for number, rank in enumerate(ranks):
            since = frozen_since.setdefault(number, time.monotonic())
            if rank.pid is None or not _is_frozen(rank.pid):
                del frozen_since[number]
            elif time.monotonic() - since > _FROZEN_SECONDS:
                message = (
                    f"a signal suspended rank {first + number}, and the other ranks could not continue "
                    "without it"
                )
                run.write_failure(Failure(code="rank_lost", message=message, permanent=False))
                return 1
        time.sleep(_POLL_SECONDS)


def _end_after_failure(run: RunDirectory, ranks: list[BaseProcess], first: int) -> int:
    """Finds the rank that failed by itself, ends the others, and stores its failure as that of the run."""
    until = time.monotonic() + _CAUSE_SECONDS
    cause: int | None = None
    while cause is None and time.monotonic() < until and any(rank.exitcode is None for rank in ranks):
        cause = _cause(ranks)
        time.sleep(_POLL_SECONDS)
    cause = _cause(ranks) if cause is None else cause
    if cause is not None and ranks[cause].exitcode == INTERRUPTED:
        _wait_for_all(ranks)  # a requested interruption ends all of them
    _kill(ranks)
    if cause is None and has_other_nodes():
        return LOST_RANK  # another node reports the cause
    if cause is None:
        message = "the ranks lost their connection to each other"
        run.write_failure(Failure(code="rank_lost", message=message, permanent=False))
        return 1
    status = ranks[cause].exitcode or 0
    number = first + cause
    if _failure_file(run, number).exists():
        _failure_file(run, number).replace(run.path / "failure.json")
    elif status < 0:
        name = signal.Signals(-status).name
        hint = " (often because the machine ran out of memory)" if name == "SIGKILL" else ""
        message = f"rank {number} was ended by {name}{hint}"
        run.write_failure(Failure(code="trainer_killed", message=message, permanent=False))
    return status if status > 0 else 1


def _wait_for_all(ranks: list[BaseProcess]) -> None:
    until = time.monotonic() + _STOP_SECONDS
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _cause(ranks: list[BaseProcess]) -> int | None:
    """A rank that failed, and not because it lost another one; None if there is none yet."""
    statuses = [rank.exitcode for rank in ranks]
    if RANKS_MUST_RESTART in statuses:  # what it has learned would be lost with a failure of another rank
        return statuses.index(RANKS_MUST_RESTART)
    return next((n for n, status in enumerate(statuses) if status not in (None, 0, LOST_RANK)), None)


def _failure_file(run: RunDirectory, rank: int) -> Path:
    return run.path / ("failure.json" if rank == 0 else f"failure-{rank}.json")


def _is_frozen(pid: int) -> bool:
    """Whether a process was stopped by a signal (Linux only)."""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")
    return False


def _kill(ranks: list[BaseProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
