"""Admission: checks a request, fills in its defaults, and plans it. (Limits of a key: key_limits.py.)"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from app.contract.accumulation import AccumulationConfig, overridden
from app.contract.model_reference import ModelReference
from app.contract.objective import ObjectiveName
from app.contract.plan import Plan
from app.contract.preview import Lengths, PreviewSpec
from app.contract.spec import Spec
from app.datasets import content, dataset_folder, files, lengths
from app.datasets.content import DataFiles
from app.datasets.dataset_config import DatasetConfig
from app.errors import Unprocessable
from app.jobs import configurations, parent_jobs
from app.jobs.lifecycle import Submission
from app.jobs.request_schemas import TrainingRequest
from app.memory_profiles.profiles import ProfileKey
from app.models import base_models, starting_models
from app.models.base_models import PlannableModel
from app.planning.devices import Device, common_name
from app.planning.inputs import PlanningInputs
from app.planning.plan import devices_worth_using, make_plan, sample_length_of
from app.planning.planner import recipe_of_rank
from app.planning.recipes import least_capable, recipe_of
from app.settings import Settings
from app.statistics.performance import Speed
from app.storage.database import Database
from app.submissions.adapter_method import training_from
from app.submissions.build_spec import Data, build_spec
from app.submissions.distribution import Distribution
from app.submissions.durations import predict, with_duration
from app.submissions.objectives import training_for, warning_of_labels, warning_of_questions
from app.submissions.requested_devices import check_workers_can_train, devices_of
from app.submissions.requested_metrics import with_metrics
from app.webhooks import addresses
from app.webhooks.addresses import NotAllowed

FindModel = Callable[[str], tuple[ModelReference, PlannableModel]]


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that can be trained as it stands."""

    submission: Submission
    own_data: DataFiles | list[dict[str, Any]] | None
    """Samples that become a file together with the job: a dataset's files, or inline lines; None where the
    request names an uploaded file."""
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
    """Whether checking a request may take long: it has its own data, its model may be on the hub, or files
    may have to be fetched from object storage."""
    brings = dataset is not None and dataset.file_id is None
    return brings or settings.object_storage is not None or not base_models.is_local(model_name, settings)


def _warnings_of_data(
    measured: Lengths, spec: Spec, objective: ObjectiveName | None
) -> tuple[str | None, ...]:
    """Warnings about what a worker has found in the data."""
    return (
        warning_of_labels(measured.unused_keys, objective),
        warning_of_questions(measured.unused_keys, spec.data.format),
        lengths.warning_of_lengths(spec.data, measured),
    )


def check(
    requested: TrainingRequest,
    inputs: PlanningInputs,
    settings: Settings,
    *,
    planned: bool = False,
    suffix: str | None = None,
    find: FindModel | None = None,
) -> AdmittedRequest:
    """Checks a request, fills in every default, and plans it.

    Args:
        planned: whether the request must leave accumulation steps and micro-batch to Accrue.
        suffix: a part of the trained model's name.
        find: finds the model by its name; None: `starting_models.find_trainable`.

    Raises:
        Unprocessable, NotFound, InvalidRequest: the request cannot be trained; the message names the field.
        TooManyRequests: many models are being looked up on the hub.
    """
    if find is not None:
        model, base = find(requested.model_name)
    else:
        model, base = starting_models.find_trainable(requested.model_name, inputs.database, settings)
    training = training_from(model, requested.training_config)
    if requested.dry_run:
        inputs = inputs.fresh()
    config, stored_devices = _config(inputs.database, requested)
    uploaded = _uploaded(inputs.database, requested.dataset_config.file_id, "file_id")
    validation = _uploaded(inputs.database, requested.dataset_config.validation_file_id, "validation_file_id")
    devices = devices_of(inputs, requested, stored_devices, settings)
    if planned:
        _check_steps_not_given(config, requested.accumulation_steps_by_device)
    own_data, described = _own_data(requested, settings)
    data = uploaded or described
    training = training_for(training, data.format)
    validates = validation is not None or requested.dataset_config.validation_split is not None
    training = with_metrics(training, validates=validates, settings=settings)
    config = _adjusted(config, requested)
    spec = build_spec(
        model,
        data,
        validation,
        requested.dataset_config,
        config,
        training,
        _distribution(requested, devices.requested),
        profile=requested.profile,
        tune=requested.tune,
        measured_margin=inputs.margin(devices.planned[0].kind),
    )
    if spec.model.job_id is not None or spec.model.layers:
        with inputs.database.reading() as session:
            parent_jobs.check_available(session, spec)
    check_workers_can_train(spec, requested.requirements, inputs)
    measured, measuring = (None, None) if uploaded is None else _lengths(spec, inputs)
    sample_length = sample_length_of(spec, measured)
    profile_key = _profile_key(spec, base, least_capable(devices.planned), sample_length)
    if requested.num_gpus == "auto":
        known = inputs.known(profile_key.architecture, common_name(devices.planned))
        devices = devices.first(devices_worth_using(spec, devices.planned, known, sample_length))
    plan, speed = _plan(spec, profile_key, devices.planned, inputs)
    predicted = predict(spec, plan, devices.planned[0], data.bytes, speed, measured, inputs)
    plan = plan if predicted is None else with_duration(plan, predicted.duration)
    if plan.strategy != "independent" and len(plan.ranks) > 1:
        recipe = recipe_of_rank(profile_key.recipe, len(plan.ranks), plan.strategy, plan.zero_stage)
        profile_key = replace(profile_key, recipe=recipe)
        inputs.request_profile(profile_key)
    fewer = _fewer_steps(config, spec, plan)
    of_data = () if measured is None else _warnings_of_data(measured, spec, training.objective)
    warnings = tuple(filter(None, (requested.sharing().warning, devices.warning, fewer, *of_data)))
    if warnings:
        plan = plan.model_copy(update={"warnings": (*plan.warnings, *warnings)})
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
        requirements=requested.requirements,
    )
    tokens = None if predicted is None else predicted.tokens
    return AdmittedRequest(submission, own_data, speed, tokens, profile_key, measuring)


def _fewer_steps(config: AccumulationConfig, spec: Spec, plan: Plan) -> str | None:
    """A warning if a batch has fewer samples than the accumulation steps that were requested for it."""
    given = config.accumulation_steps
    samples = spec.effective_batch_size
    if given is None or len(plan.ranks) > 1 or given <= samples:
        return None
    return (
        f"{given} accumulation steps were requested, but a batch has only {samples} "
        f"sample{'s' * (samples > 1)}: there are {plan.accumulation_steps} steps"
    )


def _adjusted(config: AccumulationConfig, requested: TrainingRequest) -> AccumulationConfig:
    """The configuration with what the fields about several devices change in it."""
    changes: dict[str, Any] = {}
    if requested.sharing().cpu_offload:
        changes["use_cpu_offload"] = True
    if requested.accumulation_steps_by_device is not None:
        changes["accumulation_steps"] = None
    if requested.parallel_independent:
        changes["sync_gradients"] = False
    return config.model_copy(update=changes)


def _distribution(requested: TrainingRequest, devices: int) -> Distribution:
    """How the devices share the work.

    Raises:
        Unprocessable: independent replicas are requested on one device.
    """
    sharing, strategy = requested.sharing(), None
    if not requested.parallel_independent:
        strategy = sharing.carried_out_as
    elif devices < 2:
        raise Unprocessable(
            "parallel_independent needs several devices: set num_gpus.", field="parallel_independent"
        )
    return Distribution(
        devices=devices,
        steps_by_device=requested.accumulation_steps_by_device,
        strategy="independent" if requested.parallel_independent else strategy,
        zero_stage=sharing.stage,
        average=requested.average,
        gradient_compression=sharing.gradient_compression,
    )


def _lengths(spec: Spec, inputs: PlanningInputs) -> tuple[Lengths | None, PreviewSpec | None]:
    """The measured lengths of a stored file's samples; or, if they are not known yet, the measurement that
    this has caused."""
    order = lengths.measurement_request(spec)
    if order is None:
        return None, None
    measured = inputs.lengths(order)
    return measured, order if measured is None and inputs.request_lengths(order) else None


def _own_data(
    requested: TrainingRequest, settings: Settings
) -> tuple[DataFiles | list[dict[str, Any]] | None, Data]:
    """The samples that a request contains or names as a dataset, with their description."""
    try:
        requested.dataset_config.check_chats()
    except ValueError as error:
        raise Unprocessable(f"dataset_config: {error}.", field="dataset_config") from None
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
    return found, Data(
        "file-0", checked.sha256, checked.format, checked.examples, name, checked.bytes, checked.classes
    )


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
            "Webhooks are signed, and this service has no secret to sign them with: ask its operator to set "
            "ACCRUE_WEBHOOK_SECRET, or leave webhook_url out.",
            field="webhook_url",
        )
    try:
        addresses.check(url, private=settings.webhook_private_addresses)
    except NotAllowed as error:
        raise Unprocessable(f"webhook_url: {error.message}.", field="webhook_url") from None
    return url


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
            f"Together with the stored configuration {requested.config_id}: {first}.", field="config_id"
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
