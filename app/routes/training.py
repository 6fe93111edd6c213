"""Jobs: submitted, looked at, stopped, deleted."""

import json
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import String, cast, select
from sqlalchemy.orm import Session

from app import base_models, files, gpus, jobs, measurements, profiles, stats, workers_seen
from app.base_models import BaseModel
from app.database import Database
from app.errors import Unprocessable
from app.fail_points import fail_point
from app.jobs import Submission
from app.models import Job, JobEvent
from app.planning.devices import Device
from app.planning.plan import make_plan, recipe_of
from app.profiles import Wanted
from app.routes import accumulation
from app.routes.dependencies import After, CurrentDatabase, CurrentSettings, Limit, Reading, Writing
from app.routes.job_answer import dry_run_answer, job_answer
from app.routes.pages import page
from app.run_files import remove_run
from app.schemas.accumulation import AccumulationConfig
from app.schemas.spec import Plan, Spec
from app.schemas.training import DryRunAnswer, EventAnswer, JobAnswer, JobStatus, TrainingRequest
from app.schemas.wire import Page
from app.settings import Settings
from app.stats import Speed
from app.submission import Data, freeze

_DRY_RUN_WAITS = 1.5
"""Seconds for a simulation; a submission does not wait, since the worker plans anew."""

router = APIRouter(prefix="/training", tags=["training"])

JobId = Annotated[str, Path(max_length=100, description="ftjob-…")]
_ACCEPTED: dict[int | str, dict[str, Any]] = {
    200: {"model": DryRunAnswer, "description": "With dry_run: the plan"}
}


@router.post(
    "/with-accumulation",
    status_code=202,
    responses=_ACCEPTED,
    summary="Train, with steps as given",
    response_model=JobAnswer | DryRunAnswer,
)
def with_accumulation(
    asked: TrainingRequest, response: Response, database: CurrentDatabase, settings: CurrentSettings
) -> JobAnswer | DryRunAnswer:
    """Queues a job; accumulation steps and micro-batch are taken as given, the rest is planned."""
    return _submit(asked, response, database, settings)


@router.post(
    "/large-batch",
    status_code=202,
    responses=_ACCEPTED,
    summary="Train a large batch, steps planned",
    response_model=JobAnswer | DryRunAnswer,
)
def large_batch(
    asked: TrainingRequest, response: Response, database: CurrentDatabase, settings: CurrentSettings
) -> JobAnswer | DryRunAnswer:
    """Queues a job whose accumulation steps are planned from memory."""
    return _submit(asked, response, database, settings, planned=True)


@router.get("", summary="List jobs")
def list_jobs(
    request: Request,
    session: Reading,
    limit: Limit = 20,
    after: After = None,
    status: Annotated[JobStatus | None, Query()] = None,
    user_id: Annotated[str | None, Query(max_length=200)] = None,
) -> Page[JobAnswer]:
    """Newest first; filter by `status`, `user_id` and `metadata[key]=value`."""
    query = select(Job)
    if status is not None:
        query = query.where(Job.status == status)
    if user_id is not None:
        query = query.where(cast(Job.user_id, String).in_([user_id, json.dumps(user_id)]))
    for name, value in request.query_params.items():
        if name.startswith("metadata[") and name.endswith("]"):
            query = query.where(Job.labels[name[9:-1]].as_string() == value)
    return page(session, query, Job.id, limit, after, lambda job: job_answer(session, job))


@router.get("/{training_id}", summary="A job")
def get(session: Reading, training_id: JobId) -> JobAnswer:
    return job_answer(session, jobs.get(session, training_id))


@router.post("/{training_id}/cancel", summary="Cancel a job")
def cancel(session: Writing, training_id: JobId) -> JobAnswer:
    """A waiting job ends at once; a running one as soon as its worker has stopped it."""
    return job_answer(session, jobs.cancel(session, training_id))


@router.post("/{training_id}/pause", summary="Pause a job")
def pause(session: Writing, training_id: JobId) -> JobAnswer:
    """A running job writes a checkpoint and gives its device free."""
    return job_answer(session, jobs.pause(session, training_id))


@router.post("/{training_id}/resume", summary="Resume a paused job")
def resume(session: Writing, training_id: JobId) -> JobAnswer:
    return job_answer(session, jobs.resume(session, training_id))


@router.post("/{training_id}/start", summary="Start a job that was submitted with auto_start false")
def start(session: Writing, training_id: JobId) -> JobAnswer:
    return job_answer(session, jobs.resume(session, training_id))


@router.delete("/{training_id}", status_code=204, summary="Delete an ended job and its files")
def delete(database: CurrentDatabase, settings: CurrentSettings, training_id: JobId) -> None:
    with database.writing() as session:
        job_id, file_id = jobs.remove(session, training_id)
    remove_run(settings, job_id)
    if file_id is not None:
        (settings.files_dir / file_id).unlink(missing_ok=True)


@router.get("/{training_id}/events", summary="What happened to a job, newest first")
def events(session: Reading, training_id: JobId, limit: Limit = 20, after: After = None) -> Page[EventAnswer]:
    jobs.get(session, training_id)
    query = select(JobEvent).where(JobEvent.job_id == training_id)
    return page(session, query, JobEvent.id, limit, after, _event)


def _submit(
    asked: TrainingRequest,
    response: Response,
    database: CurrentDatabase,
    settings: Settings,
    *,
    planned: bool = False,
) -> JobAnswer | DryRunAnswer:
    """Checks, freezes, plans, and stores unless it is a dry run."""
    model, base = base_models.find_for_training(asked.model_name, settings)
    with database.reading() as session:
        config, num_gpus = _config(session, asked)
        data = _uploaded(session, asked.dataset_config.file_id, "file_id")
        validation = _uploaded(session, asked.dataset_config.validation_file_id, "validation_file_id")
        devices = _devices(session, asked.gpu_ids, num_gpus, settings)
        measured_margin = measurements.margin(session, devices[0].kind)
    if planned:
        _check_that_steps_are_left_to_us(config)
    inline = asked.dataset_config.texts
    checked = data or Data(file_id="file-0", sha256="", format="text", examples=len(inline or []))
    spec = freeze(
        model,
        checked,
        validation,
        asked.dataset_config,
        config,
        asked.training_config,
        len(devices),
        profile=asked.profile,
        tune=asked.tune,
        measured_margin=measured_margin,
    )
    plan, speed = _plan(spec, base, devices[0], database, wait=asked.dry_run)
    shown = (config.model_dump(mode="json"), asked.training_config.model_dump(mode="json"))
    if asked.dry_run:
        response.status_code = 200
        return dry_run_answer(spec, plan, *shown, speed)
    submission = Submission(
        spec=spec,
        plan=plan,
        config=shown[0],
        training_config=shown[1],
        config_id=asked.config_id,
        user_id=asked.user_id,
        metadata=asked.metadata,
        priority=asked.priority,
        paused=not asked.auto_start,
    )
    job_id = _store(submission, inline, database, settings)
    with database.reading() as session:
        return job_answer(session, jobs.get(session, job_id))


def _plan(
    spec: Spec, base: BaseModel, device: Device, database: Database, *, wait: bool
) -> tuple[Plan, Speed | None]:
    """The plan by the best estimate there is, and what its duration is from.

    Where there is no simulation one is wanted for the next time.
    """
    recipe = recipe_of(spec, device)
    wanted = Wanted(spec.model.name, base.architecture, base.config, recipe, spec.data.max_length)
    profiles.ask_and_wait(database, wanted, _DRY_RUN_WAITS if wait else 0.0)
    with database.reading() as session:
        speed = stats.speed(session, spec.model.name, device.kind, spec.data.file_id)
        plan = make_plan(
            spec,
            [device],
            profiles.estimates(session, base.architecture, device.name),
            predicted=True,
            speeds=profiles.speeds(session, base.architecture, device.name),
            samples_per_second=speed.samples_per_second if speed is not None else None,
        )
        return plan, speed


def _store(
    submission: Submission, texts: list[str] | None, database: CurrentDatabase, settings: Settings
) -> str:
    """The job and its inline data, together or not at all; gives the job's id."""
    with files.incoming(settings) as (file_id, path), database.writing() as session:
        if texts is not None:
            stored = files.store_texts(texts, path)
            files.add(session, file_id, stored, filename="texts.jsonl", purpose="fine-tune", inline=True)
            data = submission.spec.data.model_copy(update={"file_id": file_id, "sha256": stored.sha256})
            spec = submission.spec.model_copy(update={"data": data})
            submission = replace(submission, spec=spec)
        job_id = jobs.submit(session, submission).id
        fail_point("service.committing")
    fail_point("service.committed")
    return job_id


def _config(session: Session, asked: TrainingRequest) -> tuple[AccumulationConfig, int]:
    """The configuration and the number of devices: of the stored one, with the request's before its own."""
    given = asked.accumulation().model_dump(mode="json", exclude_unset=True)
    if asked.config_id is None:
        return AccumulationConfig.model_validate(given), asked.num_gpus or 1
    stored = accumulation.find(session, asked.config_id, field="config_id")
    return AccumulationConfig.model_validate({**stored.given, **given}), asked.num_gpus or stored.num_gpus


def _check_that_steps_are_left_to_us(config: AccumulationConfig) -> None:
    if config.target_effective_batch_size is None:
        raise Unprocessable(
            "target_effective_batch_size is missing: say the batch you want, Accrue plans the steps.",
            field="target_effective_batch_size",
        )
    for field in ("accumulation_steps", "micro_batch_size"):
        if getattr(config, field) is not None:
            raise Unprocessable(
                f"large-batch plans {field} by itself: leave it out, or use with-accumulation.", field=field
            )


def _uploaded(session: Session, file_id: str | None, field: str) -> Data | None:
    if file_id is None:
        return None
    file = files.get(session, file_id, field=f"dataset_config.{field}")
    return Data(file.id, file.sha256, file.format, file.examples)


def _devices(session: Session, gpu_ids: list[int] | None, count: int, settings: Settings) -> list[Device]:
    """The devices that the job is reckoned for: those named, or the first of those there are."""
    there = gpus.for_planning(settings.declared_devices, workers_seen.gpus(session))
    if gpu_ids is None:
        return [there[min(number, len(there) - 1)] for number in range(count)]
    return select_devices(gpu_ids, there)


def select_devices(gpu_ids: list[int], there: list[Device]) -> list[Device]:
    """Devices by their ids.

    Raises:
        Unprocessable: one is not there; the message lists those that are.
    """
    by_id = {device.id: device for device in there}
    unknown = [str(gpu_id) for gpu_id in gpu_ids if gpu_id not in by_id]
    if unknown:
        known = ", ".join(f"{device.id} ({device.name})" for device in there)
        raise Unprocessable(
            f"gpu_ids: {', '.join(unknown)} is not there. There are: {known}. Declare devices to plan for "
            "with gpus, or with ACCRUE_GPUS=24GB,24GB.",
            field="gpu_ids",
        )
    return [by_id[gpu_id] for gpu_id in gpu_ids]


def _event(row: JobEvent) -> EventAnswer:
    return EventAnswer(
        id=row.id,
        created_at=int(row.created_at),
        level=row.level,
        type=row.type,
        message=row.message,
        data=row.data,
    )
