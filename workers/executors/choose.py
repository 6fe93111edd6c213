"""The engine that a worker's settings name."""

from dataclasses import replace

from app.devices import gpus
from app.planning.devices import Device, parse_declared
from app.settings import Settings
from workers.executors.kubernetes import KubernetesExecutor
from workers.executors.process import ProcessExecutor
from workers.executors.protocol import Executor
from workers.executors.ray_cluster import RayExecutor
from workers.executors.slurm import SlurmExecutor


def executor_of(settings: Settings) -> Executor | None:
    """The engine in which the worker's trainers run; None: they run on the worker's own machine.

    Raises:
        BadSetting: a setting that the engine needs is missing or wrong.
    """
    devices = _devices(settings)
    match settings.executor:
        case "process":
            return ProcessExecutor(devices)
        case "slurm":
            return SlurmExecutor(devices, settings.slurm_options)
        case "ray":
            return RayExecutor(devices, settings.ray_address)
        case "kubernetes":
            return KubernetesExecutor(devices, settings)
    return None


def _devices(settings: Settings) -> list[Device]:
    """The declared devices of the engine; if none are declared, as many processors as ACCRUE_CPU_DEVICES
    says, each taken to have this machine's memory."""
    phrases = [phrase for phrase in settings.executor_devices.split(",") if phrase.strip()]
    found = parse_declared(phrases) or [gpus.this_cpu()] * settings.cpu_devices
    return [replace(device, id=f"{settings.executor}:{number}") for number, device in enumerate(found)]
