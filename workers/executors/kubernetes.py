"""Runs launches as jobs of Kubernetes: plain indexed Jobs or, for a runtime of Kubeflow Trainer, TrainJobs.

It calls kubectl, with whatever access its configuration or the worker's service account gives. The pods mount
the volume that holds the data folder, at the same path, and use the worker's image.
"""

import json
from pathlib import Path
from typing import Any

from app import PACKAGES_FOLDER
from app.errors import BadSetting
from app.planning.devices import Device
from app.planning.tool_configs.job import as_yaml
from app.settings import Settings
from workers.executors.commands import call, node_command
from workers.executors.protocol import Launch, LaunchStatus, Refused, Unreachable

_LABEL = "accrue.dev/launch"

_REFUSED = ("is invalid", "is forbidden", "error validating", "no matches for kind", "denied the request")


class KubernetesExecutor:
    """Calls kubectl.

    Raises:
        BadSetting: the image or the volume is missing.
    """

    name = "kubernetes"

    def __init__(self, devices: list[Device], settings: Settings) -> None:
        missing = [name for name in ("kubernetes_image", "kubernetes_volume") if not getattr(settings, name)]
        if missing:
            raise BadSetting(f"ACCRUE_EXECUTOR=kubernetes needs ACCRUE_{missing[0].upper()}")
        self._devices, self._settings = devices, settings
        self._kind = "trainjob" if settings.kubernetes_runtime else "job"

    def devices(self) -> list[Device]:
        self._call(["get", self._kind, "--output=name", f"--selector={_LABEL}"])
        return self._devices

    def render(self, launch: Launch) -> str:
        return as_yaml(self._train_job(launch) if self._settings.kubernetes_runtime else self._job(launch))

    def submit(self, launch: Launch) -> None:
        self._call(["apply", "--filename=-"], self.render(launch))

    def poll(self, handle: str) -> LaunchStatus:
        listed = json.loads(
            self._call(["get", self._kind, "--output=json", f"--selector={_LABEL}={_name(handle)}"])
        )
        return _found(listed["items"][0].get("status", {})) if listed["items"] else LaunchStatus("unknown")

    def cancel(self, handle: str) -> None:
        self._call(["delete", self._kind, _name(handle), "--ignore-not-found", "--wait=false"])

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        selector = f"--selector={_LABEL}={_name(handle)}"
        content = self._call(["logs", selector, "--prefix", "--tail=-1", "--ignore-errors"])
        return content[cursor:], max(cursor, len(content))

    def _job(self, launch: Launch) -> dict[str, Any]:
        """https://kubernetes.io/docs/concepts/workloads/controllers/job/"""
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(launch),
            "spec": {
                "completions": launch.nodes,
                "parallelism": launch.nodes,
                "completionMode": "Indexed",
                "backoffLimit": 0,  # Accrue's queue tries again
                "ttlSecondsAfterFinished": 3600,
                "podFailurePolicy": {
                    "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}]
                },
                "template": {
                    "metadata": {"labels": {_LABEL: _name(launch.handle)}},
                    "spec": {
                        "restartPolicy": "Never",
                        "automountServiceAccountToken": False,
                        "terminationGracePeriodSeconds": int(launch.grace_seconds) + 30,
                        "containers": [self._container(launch, "trainer")],
                        "volumes": [self._volume()],
                    },
                },
            },
        }

    def _train_job(self, launch: Launch) -> dict[str, Any]:
        """https://www.kubeflow.org/docs/components/trainer/ (TrainJob, v1alpha1)"""
        container = self._container(launch, "node")
        mounts = {"name": "node", "volumeMounts": container["volumeMounts"]}
        pod = {
            "volumes": [self._volume()],
            "terminationGracePeriodSeconds": int(launch.grace_seconds) + 30,
            "containers": [mounts],
        }
        patched = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(launch),
            "spec": {
                "runtimeRef": {"name": self._settings.kubernetes_runtime},
                "trainer": {
                    "image": container["image"],
                    "command": container["command"],
                    "env": container["env"],
                    "numNodes": launch.nodes,
                    "resourcesPerNode": container["resources"],
                },
                "runtimePatches": [
                    {
                        "manager": "accrue.dev/worker",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
                    }
                ],
            },
        }

    def _metadata(self, launch: Launch) -> dict[str, Any]:
        name = _name(launch.handle)
        return {
            "name": name,
            "namespace": self._settings.kubernetes_namespace,
            "labels": {_LABEL: name, "app.kubernetes.io/managed-by": "accrue"},
        }

    def _container(self, launch: Launch, name: str) -> dict[str, Any]:
        address = {"name": "MASTER_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        resources = {"nvidia.com/gpu": launch.devices_per_node} if launch.on_gpus else {}
        return {
            "name": name,
            "image": self._settings.kubernetes_image,
            "command": node_command(launch),
            "workingDir": str(PACKAGES_FOLDER),
            "env": [address],
            "resources": {"limits": resources} if resources else {},
            "volumeMounts": [{"name": "data", "mountPath": str(self._settings.data_dir.absolute())}],
        }

    def _volume(self) -> dict[str, Any]:
        return {"name": "data", "persistentVolumeClaim": {"claimName": self._settings.kubernetes_volume}}

    def _call(self, arguments: list[str], content: str | None = None) -> str:
        """Calls kubectl. Returns what it prints.

        Raises:
            Unreachable: the cluster does not answer.
            Refused: it refuses what is to be applied.
        """
        command = ["kubectl", f"--namespace={self._settings.kubernetes_namespace}", "--request-timeout=30s"]
        done = call([*command, *arguments], content)
        if done.returncode == 0:
            return done.stdout
        message = next(iter(done.stderr.strip().splitlines()), "kubectl failed")
        if arguments[0] == "apply" and any(sign in done.stderr for sign in _REFUSED):
            raise Refused(f"Kubernetes refuses the job: {message}")
        raise Unreachable(message)


def _name(handle: str) -> str:
    """A launch's name in Kubernetes, where names have no dots, underscores and capitals (RFC 1123)."""
    return handle.lower().replace(".", "-").replace("_", "-")


def _found(status: dict[str, Any]) -> LaunchStatus:
    """What the status of a Job or a TrainJob says."""
    conditions = {each["type"]: each for each in status.get("conditions", ()) if each["status"] == "True"}
    if "Failed" in conditions:
        failed = conditions["Failed"]
        return LaunchStatus(
            "ended",
            failed.get("message") or failed.get("reason", ""),
            was_evicted=failed.get("reason") == "PodFailurePolicy",
        )
    if "Complete" in conditions:
        return LaunchStatus("ended", "Complete")
    if "Suspended" in conditions:
        return LaunchStatus("waiting", "suspended")
    parts = status.get("jobsStatus", [status])
    ready = any(part.get("ready") or part.get("succeeded") for part in parts)
    return LaunchStatus("running" if ready else "waiting", "" if ready else "its pods are not ready")
