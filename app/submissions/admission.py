"""Admission: checks, freezes and plans a request, and enforces its owner's quota."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from app.contract.accumulation import AccumulationConfig, overridden
from app.contract.plan import Plan
from app.contract.preview import Lengths, PreviewSpec
from app.contract.spec import Spec, Strategy
from app.datasets import content, dataset_folder, files, lengths
from app.datasets.content import DataFiles
from app.datasets.dataset_config import DatasetConfig
from app.devices import gpus
from app.devices.gpus import select_devices
from app.errors import QuotaExceeded, Unprocessable
from app.jobs import configurations, lifecycle, queue, transitions
from app.jobs.lifecycle import Submission
from app.jobs.schemas import TrainingRequest
from app.memory_profiles.profiles import ProfileKey
from app.models import base_models, starting_models
from app.models.base_models import PlannableModel
from app.planning.devices import Device, common_name
from app.planning.inputs import PlanningInputs
from app.planning.plan import devices_worth_using, make_plan, sample_length_of
from app.planning.planner import divided
from app.planning.recipes import recipe_of, unsupported
from app.settings import Settings
from app.statistics.performance import Speed
from app.storage.database import Database, lock_until_commit
from app.storage.session import Session
from app.storage.tables import Job
from app.submissions.durations import predict, with_duration
from app.submissions.freeze import Data, freeze
from app.submissions.methods import training_from
from app.webhooks import addresses
from app.webhooks.addresses import NotAllowed


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that can be trained as it stands."""

    submission: Submission
    own_data: DataFiles | list[dict[str, Any]] | None
    """Samples that become a file together with the job: a data set's path, or inline lines; None where the
    request names a file."""
    speed: Speed | None
    """The speed of an earlier job with the same model, on which the plan's duration is based."""
    tokens: int | None
    """Predicted tokens in all samples of the run."""
    profile_key: ProfileKey
    """The memory profile that the plan needs; until it has been made, the plan is by formula."""
    measuring: PreviewSpec | None = None
    """The lengths whose measurement this request has caused; until they are known, the plan is for samples of
    `max_length`."""


def is_slow(model_name: str, dataset: DatasetConfig | None, settings: Settings) -> bool:
    """Whether checking a request may take long: it has its own data, or its model may be on the hub."""
    brings = dataset is not None and dataset.file_id is None
    return brings or not base_models.is_local(model_name, settings)


def check(
    requested: TrainingRequest,
    inputs: PlanningInputs,
    settings: Settings,
    *,
    planned: bool = False,
    suffix: str | None = None,
) -> AdmittedRequest:
    """Checks, freezes and plans.

    Args:
        planned: whether Accrue plans the accumulation steps.
        suffix: a part of the trained model's name.

    Raises:
        Unprocessable, NotFound: the request cannot be trained; the message names the field.
    """
    model, base = starting_models.find_for_training(requested.model_name, inputs.database, settings)
    training = training_from(model, requested.training_config)
    if requested.dry_run:
        inputs = inputs.fresh()
    config, stored_devices = _config(inputs.database, requested)
    data = _uploaded(inputs.database, requested.dataset_config.file_id, "file_id")
    validation = _uploaded(inputs.database, requested.dataset_config.validation_file_id, "validation_file_id")
    devices = _devices(inputs, requested, stored_devices, settings)
    if planned:
        _check_steps_not_given(config, requested.accumulation_steps_by_device)
    own_data, own_data_spec = _own_data(requested, settings)
    sharing = requested.sharing()
    if sharing.cpu_offload:
        config = config.model_copy(update={"use_cpu_offload": True})
    if requested.accumulation_steps_by_device is not None:
        config = config.model_copy(update={"accumulation_steps": None})
    if requested.parallel_independent:
        config = config.model_copy(update={"sync_gradients": False})
    spec = freeze(
        model,
        data or own_data_spec,
        validation,
        requested.dataset_config,
        config,
        training,
        devices.requested,
        profile=requested.profile,
        tune=requested.tune,
        by_device=requested.accumulation_steps_by_device,
        strategy=_strategy(requested, devices.requested),
        zero_stage=sharing.stage,
        average=requested.average,
        gradient_compression=sharing.gradient_compression,
        measured_margin=inputs.margin(devices.planned[0].kind),
    )
    _check_that_workers_can(spec, inputs)
    measured, measuring = (None, None) if data is None else _lengths(spec, inputs)
    sample_length = sample_length_of(spec, measured)
    profile_key = _profile_key(spec, base, devices.planned[0], sample_length)
    if requested.num_gpus == "auto":
        known = inputs.known(profile_key.architecture, common_name(devices.planned))
        used = devices_worth_using(spec, devices.planned, known, sample_length)
        devices = _Devices(devices.requested, devices.planned[:used], used)
    plan, speed = _plan(spec, profile_key, devices.planned, inputs)
    size = (data or own_data_spec).bytes
    predicted = predict(spec, plan, devices.planned[0], size, speed, measured, inputs)
    plan = plan if predicted is None else with_duration(plan, predicted.duration)
    if plan.strategy == "fsdp" and len(plan.ranks) > 1:  # each rank has a part of the model
        recipe = divided(profile_key.recipe, len(plan.ranks), plan.zero_stage)
        profile_key = replace(profile_key, recipe=recipe)
        inputs.request_profile(profile_key)
    if sharing.warning is not None:
        plan = plan.model_copy(update={"warnings": (*plan.warnings, sharing.warning)})
    submission = Submission(
        spec=spec,
        plan=plan,
        config=config.model_dump(mode="json"),
        training_config=training.model_dump(mode="json"),
        config_id=requested.config_id,
        user_id=requested.user_id,
        metadata=requested.metadata,
        priority=requested.priority,
        paused=not requested.auto_start,
        suffix=suffix,
        webhook_url=_webhook(requested, settings),
        device_count=devices.needed,
        gpu_ids=tuple(requested.gpu_ids or ()),
    )
    tokens = None if predicted is None else predicted.tokens
    return AdmittedRequest(submission, own_data, speed, tokens, profile_key, measuring)


def _lengths(spec: Spec, inputs: PlanningInputs) -> tuple[Lengths | None, PreviewSpec | None]:
    """The measured lengths of a stored file's samples; or, if they are not known yet, the measurement that
    this has caused."""
    order = lengths.order_of(spec)
    if order is None:
        return None, None
    measured = inputs.lengths(order)
    return measured, order if measured is None and inputs.request_lengths(order) else None


def _strategy(requested: TrainingRequest, devices: int) -> Strategy | None:
    """How several devices share the work; None: as the plan decides.

    Raises:
        Unprocessable: independent replicas are requested on one device.
    """
    if requested.parallel_independent:
        if devices < 2:
            raise Unprocessable(
                "parallel_independent needs several devices: set num_gpus.", field="parallel_independent"
            )
        return "independent"
    sharing = requested.sharing()
    return sharing.carried_out_as


def _own_data(
    requested: TrainingRequest, settings: Settings
) -> tuple[DataFiles | list[dict[str, Any]] | None, Data]:
    """The samples that a request contains or names as a data set, with their description."""
    inline, name = requested.dataset_config.inline(), requested.dataset_config.dataset
    if inline is not None:
        form, lines = inline
        size = sum(len(json.dumps(line)) + 1 for line in lines)
        return lines, Data("file-0", "", form, len(lines), "", size)
    if name is None:
        return None, Data(file_id="file-0", sha256="", format="text", examples=0)
    found = dataset_folder.find(name, requested.dataset_config.reading(), settings)
    checked = content.check_files(found, settings, field="dataset_config.dataset")
    name = found.sources[0][1]
    return found, Data("file-0", checked.sha256, checked.format, checked.examples, name, checked.bytes)


def _webhook(requested: TrainingRequest, settings: Settings) -> str | None:
    """The URL that is notified when the job ends.

    Raises:
        Unprocessable: no secret is set to sign with, or the URL is not allowed.
    """
    url = requested.webhook_url or settings.webhook_url
    if url is None:
        return None
    if settings.webhook_secret is None:
        raise Unprocessable(
            "ACCRUE_WEBHOOK_SECRET is not set: webhooks are always signed.", field="webhook_url"
        )
    try:
        addresses.check(url, private=settings.webhook_private_addresses)
    except NotAllowed as error:
        raise Unprocessable(f"webhook_url: {error.message}.", field="webhook_url") from None
    return url


_QUOTA_LOCK_DISTANCE = 200
"""If fewer than this many jobs are left in the quota, submissions on PostgreSQL check it one at a time. If
more are left, no lock is needed: fewer requests than this run at the same time, so together they cannot
exceed the quota."""


def resume(session: Session, job_id: str, settings: Settings) -> Job:
    """Resumes a job as `lifecycle.resume` does; a timed-out job counts against its owner's quota again."""
    job, most = transitions.get(session, job_id), settings.max_queued_jobs
    if lifecycle.timed_out(job):
        lock_until_commit(session, f"quota of {job.owner}")
        if queue.count_waiting(session, job.owner, most) >= most:
            raise _too_many(most)
    return lifecycle.resume(session, job_id)


def check_quota(session: Session, settings: Settings) -> None:
    """Checks that the key may have another waiting job.

    Raises:
        QuotaExceeded: the key has reached its limit of waiting jobs.
    """
    most = settings.max_queued_jobs
    waiting = _count_waiting(session, most)
    if waiting > most - _QUOTA_LOCK_DISTANCE and lock_until_commit(
        session, f"quota of {session.viewer.creator}"
    ):
        waiting = queue.count_waiting(session, session.viewer.creator, most)
    if waiting >= most:
        raise _too_many(most)


def _too_many(most: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"{most} jobs of this key are waiting already, which is the limit (ACCRUE_MAX_QUEUED_JOBS): try "
        "again "
        "once some have started, or cancel some."
    )


def _count_waiting(session: Session, most: int) -> int:
    """The number of the key's waiting jobs, or an upper bound of it that is below `most`."""
    maker, transaction = session.viewer.creator, session.shared_transaction
    if transaction is None:
        return queue.count_waiting(session, maker, most)
    known: dict[str | None, int] = transaction.known.setdefault("waiting", {})
    at_most = known[maker] + 1 if maker in known else most
    known[maker] = at_most if at_most < most else queue.count_waiting(session, maker, most)
    return known[maker]


def _profile_key(spec: Spec, base: PlannableModel, device: Device, sample_length: int) -> ProfileKey:
    recipe = recipe_of(spec, device)
    return ProfileKey(spec.model.name, base.architecture, base.config, recipe, sample_length)


def _plan(
    spec: Spec, profile_key: ProfileKey, devices: Sequence[Device], inputs: PlanningInputs
) -> tuple[Plan, Speed | None]:
    """The plan by the best available estimate, and the speed that its duration is based on.

    If the memory was not simulated yet, a simulation is requested for the next time.
    """
    spec_without_seed = spec.model_copy(update={"seed": 0})
    return inputs.plan(
        spec_without_seed,
        profile_key.sequence,
        devices,
        lambda: _new_plan(spec, profile_key, devices, inputs),
    )


def _new_plan(
    spec: Spec, profile_key: ProfileKey, devices: Sequence[Device], inputs: PlanningInputs
) -> tuple[Plan, Speed | None]:
    inputs.request_profile(profile_key)
    speed = inputs.speed(spec, devices[0]) if len(devices) == 1 else None
    plan = make_plan(
        spec,
        devices,
        inputs.known(profile_key.architecture, common_name(devices)),
        predicted=True,
        sample_length=profile_key.sequence,
    )
    return plan, speed


def _config(database: Database, requested: TrainingRequest) -> tuple[AccumulationConfig, int]:
    """The configuration and its number of devices: the stored ones, if the request names a configuration,
    overridden by the request's own fields."""
    given = requested.accumulation().model_dump(mode="json", exclude_unset=True)
    if requested.config_id is None:
        return AccumulationConfig.model_validate(given), 1
    with database.reading() as session:
        stored = configurations.find(session, requested.config_id, field="config_id")
    try:
        config = AccumulationConfig.model_validate(overridden(stored.given, given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise Unprocessable(
            f"With the fields of {requested.config_id}: {first}.", field="config_id"
        ) from None
    scaling = sorted({"gradient_scaling", "lr_scaling"} & given.keys())
    scales = config.gradient_scaling and config.lr_scaling != "none"
    if scaling and scales and config.base_batch_size is None:
        raise Unprocessable(
            f"{scaling[0]} scales the learning rate from the batch that it was chosen for: set "
            f"base_batch_size to that batch, since {requested.config_id} has none.",
            field=scaling[0],
        )
    return config, stored.num_gpus


def _check_steps_not_given(config: AccumulationConfig, by_device: Sequence[int] | None) -> None:
    if config.target_effective_batch_size is None:
        raise Unprocessable(
            "target_effective_batch_size is missing: set the batch you want, and Accrue plans the steps.",
            field="target_effective_batch_size",
        )
    for field in ("accumulation_steps", "micro_batch_size"):
        if getattr(config, field) is not None or (by_device and field == "accumulation_steps"):
            raise Unprocessable(
                f"POST …/training/large-batch chooses {field} by itself: leave {field} out, or use "
                "POST …/training/with-accumulation.",
                field=field,
            )


def _uploaded(database: Database, file_id: str | None, field: str) -> Data | None:
    if file_id is None:
        return None
    with database.connecting() as connection:
        return Data(
            *files.read_row(connection, database.viewer.owner, file_id, field=f"dataset_config.{field}")
        )


@dataclass(frozen=True)
class _Devices:
    """The devices of a job."""

    requested: int
    """The requested number of devices, from which the effective batch is computed."""
    planned: list[Device]
    """Those that the plan is for; fewer than requested if no worker has as many."""
    needed: int
    """How many free devices a worker needs to start the job."""


def _devices(inputs: PlanningInputs, requested: TrainingRequest, stored: int, settings: Settings) -> _Devices:
    """The devices that the job is planned for: those named, else the first of the worker with the most.

    Declared devices are used for planning as long as there is no worker.

    Args:
        stored: the number of devices of the stored configuration, or 1.

    Raises:
        Unprocessable: no worker has a named GPU, or several machines have a GPU of that number.
    """
    by_worker = inputs.devices_by_worker()
    there = gpus.for_planning(settings.declared_devices, inputs.gpus())
    if requested.gpu_ids is not None:
        machines = inputs.machines_with_gpus()
        if by_worker and not machines:
            raise Unprocessable("gpu_ids: no worker has a GPU: leave gpu_ids out.", field="gpu_ids")
        if machines > 1:
            raise Unprocessable(
                f"gpu_ids: GPUs are numbered by machine, and {machines} machines have GPUs: leave gpu_ids "
                "out.",
                field="gpu_ids",
            )
        named = select_devices(requested.gpu_ids, inputs.gpus() if by_worker else there)
        together = [{device.id for device in own} for own in by_worker]
        if by_worker and not any(own.issuperset(requested.gpu_ids) for own in together):
            raise Unprocessable(
                "gpu_ids: no worker has all of these GPUs, and a job trains on those of one worker.",
                field="gpu_ids",
            )
        return _Devices(len(named), named, len(named))
    available = by_worker[0] if by_worker else there
    if requested.num_gpus == "auto":
        return _Devices(1, list(available), len(available))
    if requested.accumulation_steps_by_device is not None:
        count = len(requested.accumulation_steps_by_device)
    elif requested.num_gpus is not None:
        count = requested.num_gpus
    else:
        count = stored if requested.use_multi_gpu is None else 1
        count = len(available) if requested.use_multi_gpu else count
    enough = next((own for own in by_worker if len(own) >= count), available)
    planned = enough[:count]
    return _Devices(count, planned, len(planned) if by_worker else count)


def _check_that_workers_can(spec: Spec, inputs: PlanningInputs) -> None:
    """Checks that a worker's devices can train the spec; without any worker, nothing is checked.

    Raises:
        Unprocessable: no worker has a device that the method or the optimizer needs.
    """
    of_workers = [device for own in inputs.devices_by_worker() for device in own]
    kinds = {device.kind for device in of_workers}
    why = [] if "cuda" in kinds else unsupported(
        "cpu", quantised=spec.method.name == "qlora", optimizer=spec.optimizer.name
    )  # fmt: skip
    if of_workers and why:
        field = "method" if spec.method.name == "qlora" else "optimizer"
        raise Unprocessable(f"{why[0]}.", field=f"training_config.{field}")
