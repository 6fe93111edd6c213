"""What engines start on nodes, with which environment, and how their own commands are called."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from app import PACKAGE_PREFIX
from workers.executors.protocol import Launch, Unreachable
from workers.trainer_process import is_passed_on

_TIMEOUT_SECONDS = 60.0


def node_command(launch: Launch) -> list[str]:
    """The command for each node. It runs in the folder `app.PACKAGES_FOLDER`, by the same Python as here."""
    return [
        sys.executable, "-m", f"{PACKAGE_PREFIX}workers.executors.node", str(launch.folder), launch.handle,
    ]  # fmt: skip


def passed_on() -> dict[str, str]:
    """The variables that a node gets from its worker: what trainers need, and none of the worker's secrets
    but the hub's token, which the node hands to the trainer through a pipe."""
    mine = {name: value for name, value in os.environ.items() if is_passed_on(name)}
    token = os.environ.get("HF_TOKEN")
    return mine if token is None else mine | {"HF_TOKEN": token}


def call(
    command: Sequence[str], content: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Calls a command of an engine.

    Args:
        content: its standard input.
        environment: None: this process's.

    Raises:
        Unreachable: there is no such command, or it does not end in a minute.
    """
    try:
        return subprocess.run(
            command,
            input=content,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not end in {_TIMEOUT_SECONDS:g} s") from None
    except OSError as error:
        raise Unreachable(f"{command[0]}: {error.strerror}") from None
