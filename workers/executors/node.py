"""`python -m workers.executors.node FOLDER HANDLE`: runs a launch's trainer on one node.

It is to the trainer what a worker is to the trainers on its own machine, but talks to the worker only
through files (shared_files.py). It ends the trainer if the worker stops renewing, asks it to stop, or starts
another launch. SIGTERM, by which an engine takes a node away, interrupts the trainer, which writes a
checkpoint.

Exit status: that of the trainer, or 1 if none was started.
"""

import argparse
import hashlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from app.contract.assignment import Assignment
from app.contract.plan import Plan
from app.contract.regular_files import read_regular
from app.planning.devices import Device
from workers.executors.shared_files import LaunchOrder, NodeEnd, SharedFiles
from workers.run_directory import INTERRUPTED, RunDirectory
from workers.trainer_process import TrainerProcess
from workers.training.distributed.rank_launcher import FIRST_RANK_VARIABLE, RANKS_HERE_VARIABLE

log = logging.getLogger("accrue.node")

_NODE_VARIABLES = ("NODE_RANK", "SLURM_PROCID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""The variables in which engines give a node's number, from 0."""

_POLL_SECONDS = 0.2

_OTHER_NODES_SECONDS = 5.0
"""How long a node goes on after another one has failed: its own ranks usually notice that, and say more."""

_LOCK_SECONDS = 60.0
"""How long a node waits for an earlier launch to end here."""

_REPORT_SECONDS = 60.0
"""How long a node tries to report its end, if the disk is full or does not answer."""


class _Launch:
    """The launch that this process belongs to, and whether it should go on."""

    def __init__(self, files: SharedFiles, order: LaunchOrder) -> None:
        self.files, self.order = files, order
        self.is_evicted = False
        """Whether the engine has asked this node to end."""
        self._renewal = files.renewal(order.handle)
        self._renewed_at = time.monotonic()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._evict)

    def _evict(self, *_: object) -> None:
        self.is_evicted = True

    def is_renewed(self) -> bool:
        """Whether the worker has renewed since the last call."""
        now = self.files.renewal(self.order.handle)
        if now is None or now == self._renewal:
            return False
        self._renewal, self._renewed_at = now, time.monotonic()
        return True

    @property
    def is_silent(self) -> bool:
        """Whether the worker has not renewed for too long."""
        return time.monotonic() > self._renewed_at + self.order.silence_seconds

    @property
    def is_replaced(self) -> bool:
        newest = self.files.launch()
        return newest is not None and newest.handle != self.order.handle

    def must_end(self) -> bool:
        """Whether there is no reason to start, or to wait any longer."""
        self.is_renewed()
        asked = self.files.stop_requested(self.order.handle)
        return self.is_evicted or self.is_silent or self.is_replaced or asked is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.executors.node", description=__doc__)
    parser.add_argument("folder", type=Path, help="the job's folder of shared files")
    parser.add_argument("handle", help="the launch that this process belongs to")
    parser.add_argument("--node", type=int, help="this node's number; default: from the engine's variables")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    node = _number_of_node() if chosen.node is None else chosen.node
    files = SharedFiles(chosen.folder)
    order = files.launch()
    if order is None or order.handle != chosen.handle:
        log.warning("%s was replaced by another launch", chosen.handle)
        return 1
    launch = _Launch(files, order)
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        with files.node_locked(node) as alone:
            if alone:
                return _run(launch, node)
        if launch.must_end() or time.monotonic() > until:
            log.warning("another process runs on node %d", node)
            return 1
        time.sleep(_POLL_SECONDS)


def _number_of_node() -> int:
    return next((int(os.environ[name]) for name in _NODE_VARIABLES if os.environ.get(name)), 0)


def _run(launch: _Launch, node: int) -> int:
    """Runs the trainer, unless this launch has run here already, and reports how it ended."""
    if node in launch.files.ends(launch.order):
        log.warning("%s has ended on node %d already", launch.order.handle, node)
        return 1
    status = 1
    try:
        while not launch.is_renewed():  # the worker may have ended while the launch waited in the queue
            if launch.must_end():
                log.warning("%s is not to be started any more", launch.order.handle)
                status = INTERRUPTED
                return status
            time.sleep(_POLL_SECONDS)
        status = _train(launch, node)
    finally:
        _report(
            launch, node, NodeEnd(handle=launch.order.handle, status=status, was_evicted=launch.is_evicted)
        )
    return abs(status)


def _report(launch: _Launch, node: int, end: NodeEnd) -> None:
    until = time.monotonic() + _REPORT_SECONDS
    while True:
        try:
            launch.files.write_end(node, end)
        except OSError:
            log.exception("the end could not be reported")
            if launch.is_replaced or time.monotonic() > until:
                return
            time.sleep(1.0)
        else:
            return


def _train(launch: _Launch, node: int) -> int:
    """Runs the trainer to its end. Returns its exit status, negative after a signal."""
    files, order = launch.files, launch.order
    run = RunDirectory(Path(order.run_dir))
    content = read_regular(run.path, "spec.json") or b""
    if hashlib.sha256(content).hexdigest() != order.assignment_sha256:
        log.error("spec.json is not the one that the worker wrote")
        return 1
    variables = _variables(launch, node) if order.nodes > 1 else {}
    if variables is None:
        return INTERRUPTED
    files.note_start(order.handle, node)
    trainer = TrainerProcess(
        run,
        _devices(Assignment.model_validate_json(content).plan, order, node),
        order.silence_seconds,
        network=order.network,
        view=order.view,
        variables=variables,
    )
    log.info("trainer started, pid %d", trainer.pid)
    is_interrupted = False
    failed_at: float | None = None
    while (status := trainer.status()) is None:
        if launch.is_renewed():
            trainer.sign_of_life()
        stop = files.stop_requested(order.handle)
        if stop == "kill" or launch.is_silent or launch.is_replaced or trainer.overdue:
            trainer.kill()
        elif (stop or launch.is_evicted) and not is_interrupted:
            log.info("the trainer is interrupted")
            is_interrupted = True
            trainer.interrupt(order.grace_seconds)
        if any(end.status for end in files.ends(order).values()):  # another node has failed
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + _OTHER_NODES_SECONDS:
                trainer.kill()
        time.sleep(_POLL_SECONDS)
    trainer.close()
    log.info("the trainer ended with status %d", status)
    return status


def _variables(launch: _Launch, node: int) -> Mapping[str, str] | None:
    """What the ranks of one of several nodes need to find the others. None if this node had to stop, or the
    worker stopped renewing, before the first node said where it listens."""
    files, order = launch.files, launch.order
    if node == 0:
        files.write_master(order.handle, f"{_own_address()}:{_free_port()}")
    while (master := files.master(order.handle)) is None:
        if launch.must_end():
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
