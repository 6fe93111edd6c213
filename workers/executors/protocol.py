"""What Accrue needs of an engine that runs trainers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from app.planning.devices import Device


@dataclass(frozen=True)
class Launch:
    """One attempt at a job: `node_command` on each of some nodes. The handle is stored before the launch."""

    handle: str
    folder: Path  # of the job's shared files (shared_files.py)
    nodes: int
    devices_per_node: int
    on_gpus: bool
    grace_seconds: float  # how long the trainer may take to write a checkpoint after SIGTERM


@dataclass(frozen=True)
class LaunchStatus:
    """What an engine says of a launch."""

    state: Literal["waiting", "running", "ended", "unknown"]
    reason: str = ""
    was_evicted: bool = False  # for a reason that is not the job's: preemption, or a lost node


class Unreachable(Exception):
    """The engine does not answer: ask again later."""


class Refused(Exception):
    """The engine refuses the launch for good; the message is for the job's owner."""


class Executor(Protocol):
    """An engine. Every method may raise Unreachable; `submit` and `cancel` may be repeated."""

    name: str

    def devices(self) -> list[Device]:
        """The devices that the engine has for this worker's jobs, whether they are free or not."""

    def render(self, launch: Launch) -> str:
        """What `submit` gives to the engine, as text."""

    def submit(self, launch: Launch) -> None:
        """Starts a launch, unless the engine has it already. Raises Refused."""

    def poll(self, handle: str) -> LaunchStatus:
        """What has become of a launch; `unknown` if the engine does not know the handle."""

    def cancel(self, handle: str) -> None:
        """Ends a launch, if the engine has it."""

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        """What the nodes have printed since a cursor (0: the beginning), and the new cursor."""
