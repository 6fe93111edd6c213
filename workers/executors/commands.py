"""What engines start on nodes, and with which environment."""

import os
import sys

from app import PACKAGE_PREFIX
from workers.executors.protocol import Launch
from workers.trainer_process import is_passed_on


def node_command(launch: Launch) -> list[str]:
    """The command for each node. It runs in the folder `app.PACKAGES_FOLDER`, by the same Python as here."""
    return [
        sys.executable, "-m", f"{PACKAGE_PREFIX}workers.executors.node", str(launch.run_dir), launch.handle,
    ]  # fmt: skip


def passed_on() -> dict[str, str]:
    """The variables that a node gets from its worker: what trainers need, and none of the worker's secrets
    but the hub's token, which the node hands to the trainer through a pipe."""
    mine = {name: value for name, value in os.environ.items() if is_passed_on(name)}
    token = os.environ.get("HF_TOKEN")
    return mine if token is None else mine | {"HF_TOKEN": token}
