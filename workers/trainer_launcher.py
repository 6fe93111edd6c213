"""Starts the trainer of a claimed job: plans for this device, makes the run directory, starts the process."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from app.contract.assignment import Assignment
from app.contract.fail_points import fail_point
from app.contract.metric_programs import metric_programs
from app.contract.plan import Plan
from app.contract.spec import Spec
from app.datasets import lengths
from app.devices import gpus
from app.jobs import events, queue, transitions
from app.jobs.transitions import Fence
from app.memory_profiles import profiles
from app.planning.devices import Device, common_name
from app.planning.memory import bytes_on_disk, checkpoint_bytes
from app.planning.plan import make_plan, sample_length_of
from app.planning.planner import PlannerEvidence, recipe_of_rank
from app.planning.recipes import least_capable, recipe_of
from app.settings import Settings
from app.storage.database import Database
from app.storage.disk import bytes_used
from app.storage.objects import ObjectStorage
from app.storage.session import Session
from app.storage.tables import Job
from workers.executors.protocol import Executor, Launch
from workers.executors.remote_trainer import LaunchParameters, RemoteTrainer, handle_of
from workers.job_inputs import Inputs, PendingTrainer, fetch_run, find_inputs
from workers.leases import Running, Trainer
from workers.run_directory import RunDirectory
from workers.trainer_process import TrainerProcess
from workers.training.processes.filesystem_view import named_view
from workers.training.processes.fork_server import ForkServer

log = structlog.get_logger("accrue.worker")

_CHECKPOINT_BYTES_PER_SECOND = 50e6
"""How fast even a slow disk, such as one in the network, writes a checkpoint."""


@dataclass(frozen=True)
class TrainerLauncher:
    """Starts the trainers of one worker."""

    settings: Settings
    database: Database
    executor: Executor | None = None
    """The engine that runs the trainers; None: they run on this machine."""
    fork_server: ForkServer | None = None
    """What starts trainers on this machine; None: each is started directly."""

    def fetch(
        self,
        job: Job,
        fence: Fence,
        devices: tuple[Device, ...],
        claimed_at: float,
        locks: list[int],
        storage: ObjectStorage,
    ) -> Running:
        """Fetches what the job needs from object storage, in a thread. Once its trainer has `inputs`, they
        can be given to `launch`.

        Args:
            claimed_at, locks: as in `launch`.
        """
        spec = Spec.model_validate(job.spec)

        def fetch(is_cancelled: Callable[[], bool]) -> Inputs:
            attempt = fetch_run(self.settings, storage, fence, is_cancelled)
            return replace(find_inputs(spec, self.settings), stored_attempt=attempt)

        return Running(
            fence,
            devices,
            PendingTrainer(fetch, locks),
            RunDirectory(self.settings.runs_dir / fence.job_id),
            claimed_at + self.settings.lease_seconds,
            timeout_at=None,
            grace_seconds=0.0,
            requested_devices=job.device_count,
        )

    def launch(
        self,
        job: Job,
        fence: Fence,
        devices: tuple[Device, ...],
        claimed_at: float,
        locks: list[int],
        inputs: Inputs | None = None,
    ) -> Running:
        """Plans for the devices, writes the run directory and starts the trainer in it.

        The process is started last, so that an earlier failure leaves no process behind.

        Args:
            claimed_at: when the lease began, on the monotonic clock.
            locks: descriptors of the devices' locks, which the trainer inherits.
            inputs: what was fetched from object storage; None: nothing is.

        Raises:
            LostJob: the job belongs to another worker by now.
            DamagedRunDirectory: its run directory cannot be used.
            OSError: the disk is full, or the process cannot be started.
            ValueError: the model is local, and ACCRUE_MODELS_DIR is not set for the worker.
        """
        spec = Spec.model_validate(job.spec)
        self._check_disk_space(spec, job.id)
        earlier = Plan.model_validate(job.plan)
        resumed = self._resumed_plan(spec, earlier, devices)
        plan = resumed or self._new_plan(spec, devices)
        programs = metric_programs(self.settings.metric_programs_dir)
        found = inputs or find_inputs(spec, self.settings)
        assignment = Assignment(
            job_id=job.id,
            attempt=job.attempt,
            spec=spec,
            plan=plan,
            data_file=found.data_file,
            validation_file=found.validation_file,
            model_path=found.model_path,
            layer_paths=found.layer_paths,
            metrics={name: path for name, path in programs.items() if name in spec.metrics},
        )
        with self.database.writing() as session:
            queue.store_plan(session, fence, plan, _name(devices))
            if not earlier.predicted and resumed is None:
                message = (
                    "The job continues on other devices, with a new plan and the same effective batches."
                )
                events.record_event(
                    session, transitions.get(session, job.id), "plan_changed", message, level="warning"
                )
        run = RunDirectory(self.settings.runs_dir / fence.job_id)
        run.check_entries()
        run.write_assignment(assignment)
        if inputs is not None:
            with self.database.reading() as session:
                run.continue_events_after(events.last_line(session, job.id))
        run.end_cooling_down()  # a request of an earlier attempt
        if job.requested == "stop":
            run.request_finish()
        fail_point("supervisor.ordered")
        timeout_at = self._timeout_at(spec, fence)
        silence = self.settings.lease_seconds - self.settings.heartbeat_seconds - 1
        network = self.settings.trainer_network
        view = named_view(self.settings.data_dir, assignment) if self.settings.trainer_isolation else ""
        lease_until = claimed_at + self.settings.lease_seconds
        # A GPU's checkpoint may still be being written when the last one begins (CheckpointWriter).
        checkpoints = checkpoint_bytes(spec) * (2 if devices[0].kind == "cuda" else 1)
        grace = self.settings.stop_grace_seconds + checkpoints / _CHECKPOINT_BYTES_PER_SECOND
        trainer: Trainer
        if self.executor is None:
            trainer = TrainerProcess(
                run,
                devices,
                silence,
                network=network,
                device_locks=locks,
                view=view,
                fork_server=self.fork_server,
            )
        else:
            parameters = LaunchParameters(job.id, job.attempt, silence, grace, network, view)
            launch = self._launch_in_engine(spec, parameters, devices)
            trainer = RemoteTrainer(self.executor, run, launch, parameters, locks)
        log.info("trainer started", job=job.id, attempt=job.attempt, pid=trainer.pid)
        return Running(fence, devices, trainer, run, lease_until, timeout_at, grace, job.device_count)

    def _launch_in_engine(
        self, spec: Spec, parameters: LaunchParameters, devices: tuple[Device, ...]
    ) -> Launch:
        """One attempt, on as few nodes as `devices_per_node` allows, all with the same number of devices.
        Independent replicas always run on one node."""
        per_node = min(self.settings.devices_per_node, len(devices))
        if spec.strategy == "independent":
            per_node = len(devices)
        while len(devices) % per_node:
            per_node -= 1
        return Launch(
            handle=handle_of(parameters.job_id, parameters.attempt),
            folder=self.settings.launches_dir / parameters.job_id,
            nodes=len(devices) // per_node,
            devices_per_node=per_node,
            on_gpus=devices[0].kind == "cuda",
            grace_seconds=parameters.grace_seconds,
        )

    def _check_disk_space(self, spec: Spec, job_id: str) -> None:
        """Checks that the disk has space for the checkpoints and the model that the job writes, apart from
        what earlier attempts have written.

        Raises:
            OSError: it has not.
        """
        free = shutil.disk_usage(self.settings.runs_dir).free
        if free + bytes_used(self.settings.runs_dir / job_id) < bytes_on_disk(spec):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _resumed_plan(self, spec: Spec, earlier: Plan, devices: tuple[Device, ...]) -> Plan | None:
        """The plan of an earlier attempt, if it was made for devices like these."""
        if earlier.predicted or len(earlier.ranks) != len(devices):
            return None
        ranks = []
        for rank, device in zip(earlier.ranks, devices, strict=True):
            limit = spec.memory.budget(device.memory_bytes)
            alike = earlier.device == device.kind and rank.memory_limit_bytes == limit
            if not alike or rank.name not in (None, device.name):
                return None
            ranks.append(rank.model_copy(update={"gpu_id": device.id}))
        return earlier.model_copy(update={"ranks": tuple(ranks)})

    def _new_plan(self, spec: Spec, devices: tuple[Device, ...]) -> Plan:
        threads = None
        if devices[0].kind == "cpu":
            together = self.settings.cpu_threads or gpus.cpu_threads()
            threads = max(1, together // self.settings.cpu_devices)
        with self.database.reading() as session:
            known = profiles.known(session, spec.model.architecture, common_name(devices))
            length = _sample_length(session, spec, devices, known)
            return make_plan(spec, devices, known, predicted=False, sample_length=length, threads=threads)

    def _timeout_at(self, spec: Spec, fence: Fence) -> float | None:
        """The time on the monotonic clock at which the job reaches its `timeout_seconds`, or None."""
        if not spec.timeout_seconds:
            return None
        with self.database.reading() as session:
            return time.monotonic() + spec.timeout_seconds - queue.seconds_run(session, fence)


def _sample_length(session: Session, spec: Spec, devices: Sequence[Device], known: PlannerEvidence) -> int:
    """Tokens of a sample of full length: as measured, unless memory was simulated for `max_length` alone."""
    order, most = lengths.measurement_request(spec), spec.data.max_length
    measured = sample_length_of(spec, None if order is None else lengths.find(session, order))
    recipe = recipe_of(spec, least_capable(devices))
    if len(devices) > 1:
        recipe = recipe_of_rank(recipe, len(devices), spec.strategy, spec.zero_stage or 3)
    if known.estimates(recipe, measured).source == "formula" != known.estimates(recipe, most).source:
        return most
    return measured


def _name(devices: Sequence[Device]) -> str:
    """The devices as a job shows them, such as cpu, cuda:0,2 or slurm:0,slurm:1."""
    if isinstance(devices[0].id, str):
        return ",".join(str(device.id) for device in devices)
    return "cuda:" + ",".join(str(device.id) for device in devices)


def why_not_started(error: Exception) -> str:
    """The message for the job's owner. It quotes a ValueError; of any other error it shows only the type,
    since the text may contain paths."""
    what = str(error).splitlines()[0] if isinstance(error, ValueError) else type(error).__name__
    return f"the trainer could not be started: {what}"
