"""A Ray cluster of several nodes on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx2 as httpx

from tests.harness.runs import until
from tests.harness.service import free_port

IS_HERE = find_spec("ray") is not None


_NOTICES_SOON = {"RAY_health_check_failure_threshold": "3", "RAY_health_check_period_ms": "1000"}
"""Ray notices after a few seconds that a node is lost."""


class RayCluster:
    """A head node, and any number of others, each with one CPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._dashboard = free_port(), free_port()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"http://127.0.0.1:{self._dashboard}"

    def start_head(self) -> None:
        dashboard = ["--include-dashboard=true", f"--dashboard-port={self._dashboard}"]
        self._start("--head", f"--port={self._port}", *dashboard, f"--temp-dir={self._folder}")
        until(self.answers, 90)

    def add_node(self) -> subprocess.Popen[bytes]:
        before = self.count_alive()
        node = self._start(f"--address=127.0.0.1:{self._port}")
        until(lambda: self.count_alive() > before, 60)
        return node

    def lose(self, node: subprocess.Popen[bytes]) -> None:
        """Kills a node with everything that runs on it, without a warning."""
        for pid in _below(node.pid):
            os.kill(pid, 9)
        node.wait()

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/api/version").status_code == 200 and self.count_alive() > 0
        except (httpx.HTTPError, KeyError, ValueError):
            return False

    def count_alive(self) -> int:
        found = httpx.get(f"{self.address}/nodes", params={"view": "summary"}).json()["data"]["summary"]
        return sum(node["raylet"].get("state") == "ALIVE" for node in found)

    def end(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                self.lose(node)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [
            f"{Path(sys.executable).parent}/ray", "start", "--block", "--num-cpus=1", "--num-gpus=0",
            "--disable-usage-stats", "--node-ip-address=127.0.0.1", *words,
        ]  # fmt: skip
        with (self._folder / "ray.log").open("ab") as output:
            environment = {
                **os.environ,
                "RAY_health_check_failure_threshold": "3",
                "RAY_health_check_period_ms": "1000",
            }
            node = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self._nodes.append(node)
        return node


def _below(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Runs a head node until the end of the block."""
    cluster = RayCluster(folder)
    try:
        cluster.start_head()
        yield cluster
    finally:
        cluster.end()
