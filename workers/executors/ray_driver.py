"""`python -m workers.executors.ray_driver`: places a launch's nodes in a Ray cluster, and waits for them.

It runs within the cluster, as the entrypoint of a Ray job (ray_cluster.py). Each node is an actor with the
devices of one bundle of a placement group; it starts node.py, which does the rest.

Exit status: 0 if all nodes have ended with success, 69 if a node was lost, 1 otherwise.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app import PACKAGES_FOLDER
from workers.executors.commands import node_command
from workers.executors.protocol import Launch
from workers.executors.ray_cluster import LOST_NODE
from workers.executors.shared_files import LOG


class Node:
    """Runs node.py on the machine on which Ray places it."""

    def run(self, command: list[str], log: str) -> int:
        """Returns the exit status."""
        address = ray.util.get_node_ip_address()
        with Path(log).open("ab") as output:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "MASTER_ADDR": address},
                cwd=PACKAGES_FOLDER,
                check=False,
            ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("handle")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--gpus", action="store_true")
    chosen = parser.parse_args()
    launch = Launch(chosen.handle, chosen.folder, chosen.nodes, chosen.devices, chosen.gpus, 0.0)
    ray.init(address="auto", log_to_driver=False)
    bundle = {"GPU" if launch.on_gpus else "CPU": float(launch.devices_per_node)}
    group = placement_group(
        [bundle] * launch.nodes, strategy="SPREAD" if launch.nodes > 1 else "PACK", name=launch.handle
    )
    ray.get(group.ready())
    placed = [
        ray.remote(Node)
        .options(
            num_cpus=0 if launch.on_gpus else launch.devices_per_node,
            num_gpus=launch.devices_per_node if launch.on_gpus else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=node
            ),
        )
        .remote()
        for node in range(launch.nodes)
    ]
    log = str(launch.folder / LOG)
    pending = [
        actor.run.remote([*node_command(launch), "--node", str(node)], log)
        for node, actor in enumerate(placed)
    ]
    statuses = []
    while pending:
        ended, pending = ray.wait(pending)
        try:
            statuses += ray.get(ended)
        except RayActorError as error:
            print(f"a node was lost: {error}", file=sys.stderr)
            return LOST_NODE
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
