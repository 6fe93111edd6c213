"""The files in a run directory through which a worker and the nodes that train its job communicate.

    launch.json      the launch that may use the directory: written by the worker, before the engine gets it
    renewals         a number that the worker changes while it holds the job's lease
    stop             asks the nodes to interrupt the trainer, or to kill it: written by the worker
    master           where rank 0 listens: written by the first node
    started          the launch whose trainers may have been started: written by the nodes
    node-0.json      how the trainer of a node ended: written by that node
    node-0.lock      held by the process that runs on a node for the launch
    executor.log     what the nodes print

Nobody compares clocks: a node measures with its own clock how long the renewals have not changed.
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

from app.contract.plain_files import NotPlain, read_plain
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


class SharedFiles:
    """Reads and writes these files of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        self.log = run_dir / LOG

    def write_launch(self, order: LaunchOrder) -> None:
        """Replaces the launch. From now on, no node of an earlier launch starts a trainer."""
        for earlier in (_STOP, _STARTED, _MASTER, *(path.name for path in self._folder.glob("node-*.json"))):
            (self._folder / earlier).unlink(missing_ok=True)
        write_atomically(self._folder / _LAUNCH, order.model_dump_json())

    def launch(self) -> LaunchOrder | None:
        """The newest launch, or None."""
        return self._read(_LAUNCH, LaunchOrder)

    def renew(self) -> None:
        """Shows the nodes that the worker still holds the lease."""
        self._write(_RENEWALS, str(time.monotonic_ns()))

    def renewals(self) -> str:
        return self._text(_RENEWALS)

    def request_stop(self, how: Stop) -> None:
        self._write(_STOP, how)

    def stop_requested(self) -> Stop | None:
        asked = self._text(_STOP)
        return "interrupt" if asked == "interrupt" else "kill" if asked == "kill" else None

    def note_start(self, handle: str) -> None:
        """Shows that a node starts the trainer of a launch."""
        write_atomically(self._folder / _STARTED, handle)

    def has_started(self, handle: str) -> bool:
        return self._text(_STARTED) == handle

    def write_master(self, handle: str, address: str) -> None:
        """Publishes where rank 0 listens, as host:port."""
        write_atomically(self._folder / _MASTER, f"{handle} {address}")

    def master(self, handle: str) -> str | None:
        """Where rank 0 of this launch listens; None if that is not known yet."""
        whose, _, address = self._text(_MASTER).partition(" ")
        return address if whose == handle else None

    def write_end(self, node: int, end: NodeEnd) -> None:
        write_atomically(self._folder / f"node-{node}.json", end.model_dump_json())

    def ends(self, order: LaunchOrder) -> dict[int, int]:
        """The exit statuses of the nodes that have ended, by node."""
        found = {node: self._read(f"node-{node}.json", NodeEnd) for node in range(order.nodes)}
        return {node: end.status for node, end in found.items() if end and end.handle == order.handle}

    @contextmanager
    def node_locked(self, node: int) -> Iterator[bool]:
        """Yields whether this process alone runs on the node, and holds that right until the end of the
        block."""
        with (self._folder / f"node-{node}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _read(self, name: str, kind: type[Content]) -> Content | None:
        with contextlib.suppress(NotPlain, ValidationError):
            content = read_plain(self._folder, name, max_bytes=_MAX_BYTES)
            return None if content is None else kind.model_validate_json(content)
        return None

    def _text(self, name: str) -> str:
        with contextlib.suppress(NotPlain):
            return (read_plain(self._folder, name, max_bytes=_MAX_BYTES) or b"").decode(errors="replace")
        return ""

    def _write(self, name: str, content: str) -> None:
        """Writes a small file in place, which other machines see sooner than a new file (nfs(5))."""
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode())
            file.truncate()
