"""`python -m workers.executors.node RUN_DIR HANDLE`: runs a launch's trainer on one node.

It is to the trainer what a worker is to the trainers on its own machine, but talks to the worker only
through files of the run directory (shared_files.py). It ends the trainer if the worker stops renewing, asks
it to stop, or starts another launch. SIGTERM, by which an engine takes a node away, interrupts the trainer,
which writes a checkpoint.

Exit status: that of the trainer, or 1 if none was started.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from app.contract.plan import Plan
from app.planning.devices import Device
from workers.executors.shared_files import LaunchOrder, NodeEnd, SharedFiles
from workers.run_directory import RunDirectory
from workers.trainer_process import TrainerProcess
from workers.training.distributed.launcher import FIRST_RANK_VARIABLE, RANKS_HERE_VARIABLE

log = logging.getLogger("accrue.node")

_NODE_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""The variables in which engines give a node's number, from 0."""

_POLL_SECONDS = 0.2

_OTHER_NODES_SECONDS = 5.0
"""How long a node goes on after another one has failed: its own ranks usually notice that, and say more."""


class _Terminations:
    """Whether the engine has asked this node to end."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self.requested = True


class _Renewals:
    """How long the worker has not renewed, by this machine's clock."""

    def __init__(self, files: SharedFiles) -> None:
        self._files = files
        self._last, self._changed_at = files.renewals(), time.monotonic()

    def changed(self) -> bool:
        """Whether the worker has renewed since the last call."""
        now = self._files.renewals()
        if now == self._last:
            return False
        self._last, self._changed_at = now, time.monotonic()
        return True

    def silent_seconds(self) -> float:
        return time.monotonic() - self._changed_at


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.executors.node", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("handle", help="the launch that this process belongs to")
    parser.add_argument("--node", type=int, help="this node's number; default: from the engine's variables")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    terminations = _Terminations()
    node = _number_of_node() if chosen.node is None else chosen.node
    run = RunDirectory(chosen.run_dir.absolute())
    files = SharedFiles(run.path)
    order = files.launch()
    if order is None or order.handle != chosen.handle:
        log.warning("%s was replaced by another launch", chosen.handle)
        return 1
    with files.node_locked(node) as alone:
        if not alone or node in files.ends(order):
            log.warning("%s runs on node %d already, or has ended there", order.handle, node)
            return 1
        if not _wait_for_worker(files, order, terminations):
            log.warning("the worker does not renew %s", order.handle)
            return 1
        files.note_start(order.handle)
        status = _train(run, files, order, node, terminations)
        files.write_end(node, NodeEnd(handle=order.handle, status=status))
    return abs(status)


def _number_of_node() -> int:
    return next((int(os.environ[name]) for name in _NODE_VARIABLES if os.environ.get(name)), 0)


def _wait_for_worker(files: SharedFiles, order: LaunchOrder, terminations: _Terminations) -> bool:
    """Waits until the worker renews: it may have ended while the launch waited in the engine's queue."""
    renewals = _Renewals(files)
    while not renewals.changed():
        if renewals.silent_seconds() > order.silence_seconds:
            return False
        if terminations.requested or files.stop_requested():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _train(
    run: RunDirectory, files: SharedFiles, order: LaunchOrder, node: int, terminations: _Terminations
) -> int:
    """Runs the trainer to its end. Returns its exit status, negative after a signal."""
    plan = run.assignment().plan
    variables = _variables(files, order, node, terminations) if order.nodes > 1 else {}
    if variables is None:
        return 1
    trainer = TrainerProcess(
        run,
        _devices(plan, order, node),
        order.silence_seconds,
        network=order.network,
        view=order.view,
        variables=variables,
    )
    log.info("trainer started, pid %d", trainer.pid)
    renewals, is_interrupted = _Renewals(files), False
    failed_at: float | None = None
    while (status := trainer.status()) is None:
        if renewals.changed():
            trainer.sign_of_life()
        stop = files.stop_requested()
        replaced = (newest := files.launch()) is not None and newest.handle != order.handle
        if stop == "kill" or replaced or trainer.overdue:
            trainer.kill()
        elif (stop or terminations.requested) and not is_interrupted:
            log.info("the trainer is interrupted")
            is_interrupted = True
            trainer.interrupt(order.grace_seconds)
        if any(files.ends(order).values()):  # another node has failed
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + _OTHER_NODES_SECONDS:
                trainer.kill()
        time.sleep(_POLL_SECONDS)
    trainer.close()
    log.info("the trainer ended with status %d", status)
    return status


def _variables(
    files: SharedFiles, order: LaunchOrder, node: int, terminations: _Terminations
) -> Mapping[str, str] | None:
    """What the ranks of one of several nodes need to find the others. None if this node had to stop, or the
    worker stopped renewing, before the first node said where it listens."""
    if node == 0:
        files.write_master(order.handle, f"{_own_address()}:{_free_port()}")
    renewals = _Renewals(files)
    while (master := files.master(order.handle)) is None:
        renewals.changed()
        if terminations.requested or files.stop_requested():
            return None
        if renewals.silent_seconds() > order.silence_seconds:
            return None
        time.sleep(_POLL_SECONDS)
    host, _, port = master.rpartition(":")
    return {
        FIRST_RANK_VARIABLE: str(node * order.devices_per_node),
        RANKS_HERE_VARIABLE: str(order.devices_per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def _own_address() -> str:
    """The address at which other nodes reach this one: the engine's variable, or else this host's name."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _devices(plan: Plan, order: LaunchOrder, node: int) -> list[Device]:
    """The devices of this node's ranks, by the names under which this machine's CUDA knows them."""
    first = node * order.devices_per_node
    ranks = plan.ranks[first : first + order.devices_per_node]
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [
        Device(
            rank.gpu_id,
            rank.name or "GPU",
            rank.memory_limit_bytes,
            plan.device,
            expandable_segments=plan.device == "cuda",
            uuid=(visible[at] if at < len(visible) else str(at)) if plan.device == "cuda" else None,
        )
        for at, rank in enumerate(ranks)
    ]


if __name__ == "__main__":
    sys.exit(main())
