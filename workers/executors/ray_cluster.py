"""Runs launches as jobs of a Ray cluster, by Ray's REST interface.

The launch's handle is the job's submission id, so that Ray itself refuses a second one. The job is a small
driver (ray_driver.py) within the cluster, which places one actor on each node. The worker does not need Ray.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.planning.devices import Device
from workers.executors.commands import passed_on
from workers.executors.protocol import Launch, LaunchStatus, Refused, Unreachable

_TIMEOUT_SECONDS = 30.0

LOST_NODE = 69
"""Exit status of the driver if an actor's node was lost (EX_UNAVAILABLE)."""


class RayExecutor:
    """Calls the REST interface of a cluster's head node.

    Args:
        devices: what jobs may use at a time, at most; nodes that the cluster has lost are left out.
        address: the head node's dashboard, such as http://127.0.0.1:8265.
    """

    name = "ray"

    def __init__(self, devices: list[Device], address: str) -> None:
        self._devices = devices
        self._http = httpx.Client(base_url=address.rstrip("/"), timeout=_TIMEOUT_SECONDS)

    def devices(self) -> list[Device]:
        kind = "GPU" if any(device.kind == "cuda" for device in self._devices) else "CPU"
        nodes = self._call("GET", "/nodes", params={"view": "summary"}).json()["data"]["summary"]
        alive = [node["raylet"] for node in nodes if node["raylet"].get("state") == "ALIVE"]
        there = sum(node.get("resourcesTotal", {}).get(kind, 0) for node in alive)
        return self._devices[: int(there)]

    def render(self, launch: Launch) -> str:
        return shlex.join(
            [
                sys.executable, "-m", f"{PACKAGE_PREFIX}workers.executors.ray_driver", str(launch.folder),
                launch.handle, "--nodes", str(launch.nodes), "--devices", str(launch.devices_per_node),
                *(["--gpus"] if launch.on_gpus else []),
            ]
        )  # fmt: skip

    def submit(self, launch: Launch) -> None:
        if self.poll(launch.handle).state != "unknown":
            return
        variables = {**passed_on(), "PYTHONPATH": str(PACKAGES_FOLDER)}
        request = {
            "entrypoint": self.render(launch),
            "submission_id": launch.handle,
            "runtime_env": {"env_vars": variables},
        }
        self._call("POST", "/api/jobs/", json=request)

    def poll(self, handle: str) -> LaunchStatus:
        answer = self._call("GET", f"/api/jobs/{handle}", missing_is_fine=True)
        if answer.status_code == 404:
            return LaunchStatus("unknown")
        job = answer.json()
        match job["status"]:
            case "PENDING":
                return LaunchStatus("waiting", job.get("message") or "")
            case "RUNNING":
                return LaunchStatus("running")
            case "SUCCEEDED":
                return LaunchStatus("ended")
        reason = (job.get("message") or job["status"]).strip().splitlines()
        exit_code = job.get("driver_exit_code")
        return LaunchStatus("ended", reason[0] if reason else "", was_evicted=exit_code == LOST_NODE)

    def cancel(self, handle: str) -> None:
        self._call("POST", f"/api/jobs/{handle}/stop", missing_is_fine=True)

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        answer = self._call("GET", f"/api/jobs/{handle}/logs", missing_is_fine=True)
        content = "" if answer.status_code == 404 else answer.json()["logs"]
        return content[cursor:], max(cursor, len(content))

    def _call(
        self, method: str, path: str, *, missing_is_fine: bool = False, **request: Any
    ) -> httpx.Response:
        """Calls the interface.

        Raises:
            Unreachable: the cluster does not answer, or not with success.
            Refused: it refuses the request.
        """
        try:
            answer = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        if answer.is_success or (missing_is_fine and answer.status_code in (400, 404)):
            return answer
        message = f"{answer.status_code} {answer.text.strip().splitlines()[-1][:300] if answer.text else ''}"
        if answer.status_code in (400, 422):
            raise Refused(f"Ray rejected the job: {message}")
        raise Unreachable(message)
