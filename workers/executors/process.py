"""Runs launches as processes of this machine, to try out what happens in an engine without having one.

The nodes of a launch share the machine. Their processes have sessions of their own, so that they do not end
with the worker's: as the nodes of any engine, they end when the worker no longer renews. They are found by
the handle in their command lines.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path

from app import PACKAGES_FOLDER
from app.planning.devices import Device
from workers.executors.commands import node_command, passed_on
from workers.executors.protocol import Launch, LaunchStatus
from workers.executors.shared_files import LOG


class ProcessExecutor:
    """Starts `node.py` for each node of a launch, in sessions of their own."""

    name = "process"

    def __init__(self, devices: list[Device]) -> None:
        self._devices = devices
        self._children: dict[str, list[subprocess.Popen[bytes]]] = {}
        """Those that this worker has started, by handle."""

    def devices(self) -> list[Device]:
        return self._devices

    def render(self, launch: Launch) -> str:
        return "\n".join(shlex.join(self._command(launch, node)) for node in range(launch.nodes))

    def submit(self, launch: Launch) -> None:
        if _processes(launch.handle):
            return
        for node in range(launch.nodes):
            with (launch.folder / LOG).open("ab") as output:
                child = subprocess.Popen(
                    self._command(launch, node),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**passed_on(), "MASTER_ADDR": "127.0.0.1"},
                    start_new_session=True,
                    cwd=PACKAGES_FOLDER,
                )
            self._children.setdefault(launch.handle, []).append(child)

    def poll(self, handle: str) -> LaunchStatus:
        for child in self._children.get(handle, ()):
            child.poll()  # or else it stays in the process table
        return LaunchStatus("running" if _processes(handle) else "unknown")

    def cancel(self, handle: str) -> None:
        for pid in _processes(handle):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # what it has started ends with it
        for child in self._children.pop(handle, ()):
            child.wait()

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        return read_log(folder, cursor)

    def _command(self, launch: Launch, node: int) -> list[str]:
        return [*node_command(launch), "--node", str(node)]


def read_log(folder: Path, cursor: int) -> tuple[str, int]:
    """What nodes have written to the log since a cursor, in bytes."""
    with contextlib.suppress(OSError), (folder / LOG).open("rb") as file:
        file.seek(cursor)
        content = file.read(2**20)
        return content.decode(errors="replace"), cursor + len(content)
    return "", cursor


def _processes(handle: str) -> list[int]:
    """The processes with this handle among the words of their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if handle.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
