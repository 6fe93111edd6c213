"""The files through which a worker and the nodes that train its job communicate: launches/JOB in the data
folder. Trainers do not see this folder.

    launch.json      the newest launch of the job: written by the worker, before the engine gets it
    renewals         changes while the worker holds the job's lease
    stop             asks the nodes to interrupt the trainer, or to kill it: written by the worker
    master           where rank 0 listens: written by the first node
    started-0        the launch that a node has begun to train
    node-0.json      how the trainer of a node ended: written by that node
    node-0.lock      held by the process that runs on a node for the launch
    executor.log     what the nodes print

Each file names its launch, and the nodes of other launches ignore it. No clocks are compared: a node measures
with its own clock how long the renewals have not changed.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from app.contract.regular_files import NotRegular, read_regular
from workers.run_directory import write_atomically

_MAX_BYTES = 2**22
_LAUNCH, _RENEWALS, _STOP, _STARTED, _MASTER = "launch.json", "renewals", "stop", "started", "master"
LOG = "executor.log"

Stop = Literal["interrupt", "kill"]
Content = TypeVar("Content", bound=BaseModel)


class LaunchOrder(BaseModel):
    """What the nodes have to know of a launch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    executor: str
    handle: str
    attempt: int
    run_dir: str
    assignment_sha256: str
    """Of spec.json, which trainers could change."""
    nodes: int
    devices_per_node: int
    silence_seconds: float
    """How long the renewals may stay unchanged before the nodes end."""
    grace_seconds: float
    network: bool
    """Whether the trainer may use the network."""
    view: str
    """The files that the trainer may see (`filesystem_view.named_view`)."""


class NodeEnd(BaseModel):
    """How a node's trainer ended."""

    model_config = ConfigDict(extra="ignore")

    handle: str
    status: int
    """The exit status; negative after a signal."""
    was_evicted: bool = False
    """Whether the engine had asked the node to end."""


class NewerLaunch(Exception):
    """Another worker has launched a later attempt."""


class SharedFiles:
    """Reads and writes these files of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / LOG

    def write_launch(self, order: LaunchOrder) -> LaunchOrder | None:
        """Replaces the launch: from now on, no node of an earlier one starts a trainer. Returns the earlier
        one.

        Raises:
            NewerLaunch: there is a launch of a later attempt.
            OSError: the disk is full.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            earlier = self.launch()
            if earlier is not None and earlier.attempt > order.attempt:
                raise NewerLaunch
            write_atomically(self.folder / _LAUNCH, order.model_dump_json())
        return earlier

    def launch(self) -> LaunchOrder | None:
        """The newest launch, or None."""
        return self._read(_LAUNCH, LaunchOrder)

    def renew(self, handle: str) -> None:
        """Shows the nodes that the worker still holds the lease."""
        self._write(_RENEWALS, f"{handle} {time.monotonic_ns()}")

    def renewal(self, handle: str) -> str | None:
        """What changes with each renewal of this launch; None if there is none, or it cannot be read."""
        return self._own(_RENEWALS, handle)

    def request_stop(self, handle: str, how: Stop) -> None:
        self._write(_STOP, f"{handle} {how}")

    def stop_requested(self, handle: str) -> Stop | None:
        asked = self._own(_STOP, handle)
        return "interrupt" if asked == "interrupt" else "kill" if asked == "kill" else None

    def write_master(self, handle: str, address: str) -> None:
        """Publishes where rank 0 listens, as host:port."""
        write_atomically(self.folder / _MASTER, f"{handle} {address}")

    def master(self, handle: str) -> str | None:
        """Where rank 0 of this launch listens; None if that is not known yet."""
        return self._own(_MASTER, handle)

    def note_start(self, handle: str, node: int) -> None:
        """Shows that a node begins to train."""
        write_atomically(self.folder / f"{_STARTED}-{node}", f"{handle} started")

    def started(self, order: LaunchOrder) -> int:
        """How many nodes of a launch have begun to train."""
        found = (self._own(f"{_STARTED}-{node}", order.handle) for node in range(order.nodes))
        return sum(each is not None for each in found)

    def write_end(self, node: int, end: NodeEnd) -> None:
        write_atomically(self.folder / f"node-{node}.json", end.model_dump_json())

    def ends(self, order: LaunchOrder) -> dict[int, NodeEnd]:
        """The nodes of a launch that have ended."""
        found = {node: self._read(f"node-{node}.json", NodeEnd) for node in range(order.nodes)}
        return {node: end for node, end in found.items() if end and end.handle == order.handle}

    @contextmanager
    def node_locked(self, node: int) -> Iterator[bool]:
        """Yields whether this process alone runs on the node, and holds that right until the end of the
        block."""
        with (self.folder / f"node-{node}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _own(self, name: str, handle: str) -> str | None:
        """What a file says of a launch; None if it is of another one, or cannot be read now."""
        with contextlib.suppress(NotRegular, OSError):
            content = (read_regular(self.folder, name, max_bytes=_MAX_BYTES) or b"").decode(errors="replace")
            whose, _, said = content.partition(" ")
            return said if whose == handle else None
        return None

    def _read(self, name: str, kind: type[Content]) -> Content | None:
        with contextlib.suppress(NotRegular, ValidationError, OSError):
            content = read_regular(self.folder, name, max_bytes=_MAX_BYTES)
            return None if content is None else kind.model_validate_json(content)
        return None

    def _write(self, name: str, content: str) -> None:
        """Writes a small file in place, which other machines see sooner than a new file (nfs(5))."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.folder / name, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode())
            file.truncate()
