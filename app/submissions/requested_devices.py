"""The devices that a request asks for, and those that its plan is for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.contract.spec import Spec
from app.contract.worker_labels import no_worker_warning
from app.devices import gpus
from app.devices.gpus import select_devices
from app.errors import Unprocessable
from app.jobs.request_schemas import TrainingRequest
from app.planning.devices import Device
from app.planning.inputs import PlanningInputs
from app.planning.recipes import unsupported_on
from app.settings import Settings


@dataclass(frozen=True)
class RequestedDevices:
    """The devices of a job."""

    requested: int
    """The requested number of devices, from which the effective batch is computed."""
    planned: list[Device]
    """Those that the plan is for; fewer than requested if no worker has as many."""
    needed: int
    """How many free devices a worker needs to start the job."""
    warning: str | None = None
    """Why no worker can start the job now, although there are workers."""

    def first(self, count: int) -> "RequestedDevices":
        """Only the first `count` of the planned devices."""
        return replace(self, planned=self.planned[:count], needed=count)


def devices_of(
    inputs: PlanningInputs, requested: TrainingRequest, stored: int, settings: Settings
) -> RequestedDevices:
    """The devices that the job is planned for: those named, else the first devices of the first worker that
    has enough (workers with GPUs first), or of the first worker if none has.

    Declared devices are used for planning as long as there is no worker.

    Args:
        stored: the number of devices of the stored configuration, or 1.

    Raises:
        Unprocessable: no worker has a named GPU, several machines have GPUs, or no single worker has all of
            the named ones.
    """
    matching = inputs.devices_by_worker(requested.requirements)
    by_worker, warning = matching, None
    if requested.requirements and not matching and (others := inputs.devices_by_worker({})):
        by_worker = others  # to have a plan
        warning = no_worker_warning(requested.requirements)
    if requested.gpu_ids is not None:
        if warning:
            named = _like_those_of(by_worker[0], requested.gpu_ids)
        else:
            named = _named_gpus(requested, inputs, settings, matching)
        return RequestedDevices(len(named), named, len(named), warning)
    there = gpus.for_planning(settings.declared_devices, inputs.gpus())
    available = by_worker[0] if by_worker else there
    if requested.num_gpus == "auto":
        return RequestedDevices(1, list(available), len(available), warning)
    if requested.accumulation_steps_by_device is not None:
        count = len(requested.accumulation_steps_by_device)
    elif requested.num_gpus is not None:
        count = requested.num_gpus
    else:
        count = stored if requested.use_multi_gpu is None else 1
        count = len(available) if requested.use_multi_gpu else count
    enough = next((own for own in by_worker if len(own) >= count), available)
    planned = enough[:count]
    return RequestedDevices(count, planned, len(planned) if matching else count, warning)


def _like_those_of(devices: Sequence[Device], gpu_ids: Sequence[int]) -> list[Device]:
    """GPUs with these numbers, planned as if they were like another worker's, while no worker with the
    required labels runs.

    Raises:
        Unprocessable: that worker has no GPU.
    """
    if devices[0].kind != "cuda":
        raise Unprocessable("gpu_ids: no worker has a GPU: leave gpu_ids out.", field="gpu_ids")
    return [replace(devices[place % len(devices)], id=gpu_id) for place, gpu_id in enumerate(gpu_ids)]


def _named_gpus(
    requested: TrainingRequest,
    inputs: PlanningInputs,
    settings: Settings,
    by_worker: Sequence[Sequence[Device]],
) -> list[Device]:
    """The GPUs that the request names.

    Args:
        by_worker: the devices of each worker that has the required labels.

    Raises:
        Unprocessable: no worker has one of them, several machines have GPUs, or no single worker has all.
    """
    assert requested.gpu_ids is not None
    machines = inputs.machines_with_gpus(requested.requirements)
    if by_worker and not machines:
        raise Unprocessable("gpu_ids: no worker has a GPU: leave gpu_ids out.", field="gpu_ids")
    if machines > 1:
        raise Unprocessable(
            f"gpu_ids: GPUs are numbered by machine, and {machines} machines have GPUs: leave gpu_ids out, "
            "or require the hostname of one (requirements).",
            field="gpu_ids",
        )
    there = inputs.gpus(requested.requirements)
    named = select_devices(
        requested.gpu_ids, there if by_worker else gpus.for_planning(settings.declared_devices, there)
    )
    together = [{device.id for device in own} for own in by_worker]
    if by_worker and not any(own.issuperset(requested.gpu_ids) for own in together):
        raise Unprocessable(
            "gpu_ids: a job trains on the GPUs of one worker, and no worker has all of these: choose GPUs of "
            "one worker (accrue gpus).",
            field="gpu_ids",
        )
    return named


def check_workers_can_train(spec: Spec, requirements: Mapping[str, str], inputs: PlanningInputs) -> None:
    """Checks that the devices of a worker with the required labels can train the spec; without any such
    worker, nothing is checked.

    Raises:
        Unprocessable: no worker has a device that the method or the optimizer needs.
    """
    of_workers = [device for own in inputs.devices_by_worker(requirements) for device in own]
    kinds = {device.kind for device in of_workers}
    if not of_workers or "cuda" in kinds:
        return
    for field, why in unsupported_on("cpu", spec).items():
        raise Unprocessable(f"{why}.", field=f"training_config.{field}")
