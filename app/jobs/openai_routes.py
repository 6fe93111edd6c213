"""The OpenAI-compatible surface of jobs: the same jobs, in OpenAI's shape."""

import time
from typing import Annotated

from fastapi import Path, Request, Response
from sqlalchemy import Connection, select

from app.contract.base import Page
from app.contract.spec import Spec
from app.jobs import lifecycle, reads, transitions
from app.jobs.etags import NOT_MODIFIED, AnswerCache, Document, tagged
from app.jobs.filters import MetadataFilters
from app.jobs.openai_schemas import (
    CheckpointMetrics,
    DpoHyperparametersResponse,
    DpoResponse,
    FineTuningCheckpoint,
    FineTuningError,
    FineTuningEvent,
    FineTuningJob,
    FineTuningRequest,
    HyperparametersResponse,
    MethodResponse,
    SupervisedResponse,
)
from app.models.trained_models import name_of, result_file_of
from app.planning.inputs import PlanningInputs
from app.planning.learning_rate import openai_base_rate
from app.results import checkpoints
from app.results.checkpoints import Checkpoint
from app.results.series import evaluations
from app.settings import Settings
from app.storage.session import Session
from app.storage.tables import Job, JobEvent, StepMetric
from app.submissions import admission, key_limits, openai_requests
from app.submissions.admission import AdmittedRequest
from app.submissions.handler import SubmissionHandler, submit
from app.submissions.idempotency import IdempotentRequest
from app.web.dependencies import (
    AfterCheckpoint,
    AfterEvent,
    AfterJob,
    CurrentDatabase,
    CurrentIdempotentRequest,
    CurrentSettings,
    InTurn,
    Limit,
    Listing,
    ResultsAnswer,
    Writing,
    planning_inputs_of,
    slowly_of,
)
from app.web.pagination import page, page_of
from app.web.routers import openai_router
from app.web.session_route import SessionRoute

router = openai_router("/v1/fine_tuning/jobs", tags=["OpenAI: fine-tuning"], route_class=SessionRoute)

JobId = Annotated[str, Path(max_length=100, description="ftjob-…")]


@router.post("", summary="Create a fine-tuning job", response_model=FineTuningJob)
async def create(
    request: Request, requested: FineTuningRequest, idempotency: CurrentIdempotentRequest
) -> Response:
    """All other options go in `extra_body={"accumulation": …, "training_config": …, "dataset_config": …}`."""
    inputs, settings = planning_inputs_of(request), request.app.state.settings
    return await submit(
        _Handler(requested, inputs, settings, idempotency), request.app.state.group_commit, slowly_of(request)
    )


class _Handler(SubmissionHandler):
    def __init__(
        self,
        requested: FineTuningRequest,
        inputs: PlanningInputs,
        settings: Settings,
        idempotency: IdempotentRequest,
    ) -> None:
        super().__init__(inputs, settings, idempotency)
        self._requested = requested

    def is_slow(self) -> bool:
        return admission.is_slow(self._requested.model, None, self.settings)

    def check(self) -> list[AdmittedRequest]:
        return [openai_requests.check(self._requested, self.inputs, self.settings)]

    def answer(self, session: Session, jobs: list[Job]) -> FineTuningJob:
        return answer(jobs[0])


@router.get("", summary="List fine-tuning jobs", response_model=Page[FineTuningJob])
async def list_jobs(
    request: Request,
    database: CurrentDatabase,
    listing: Listing,
    in_turn: InTurn,
    filters: MetadataFilters,
    limit: Limit = 20,
    after: AfterJob = None,
) -> Response:
    """Newest first; filter by `metadata[key]=value`."""
    answer_cache: AnswerCache = request.app.state.answer_cache

    def listed() -> Response:
        with database.connecting() as connection:
            rows = reads.page(connection, reads.JOBS.where(*filters), database.viewer.owner, limit, after)
            return answer_cache.page_response("openai", rows, limit, answer)

    return await (listing(listed) if filters else in_turn(listed))  # filters may read all jobs of a key


@router.get(
    "/{fine_tuning_job_id}",
    summary="A fine-tuning job",
    response_model=FineTuningJob,
    responses=NOT_MODIFIED,
)
async def get(request: Request, fine_tuning_job_id: JobId) -> Response:
    owner = request.state.caller.owner

    answer_cache: AnswerCache = request.app.state.answer_cache

    def read(connection: Connection) -> Document:
        return answer_cache.document("openai", reads.row(connection, fine_tuning_job_id, owner), answer)

    return tagged(request, await request.app.state.immediate_reads.run(read))


@router.post("/{fine_tuning_job_id}/cancel", summary="Cancel a fine-tuning job")
def cancel(session: Writing, fine_tuning_job_id: JobId) -> FineTuningJob:
    return answer(lifecycle.cancel(session, fine_tuning_job_id))


@router.post("/{fine_tuning_job_id}/pause", summary="Pause a fine-tuning job")
def pause(session: Writing, fine_tuning_job_id: JobId) -> FineTuningJob:
    return answer(lifecycle.pause(session, fine_tuning_job_id))


@router.post("/{fine_tuning_job_id}/resume", summary="Resume a paused fine-tuning job")
def resume(session: Writing, settings: CurrentSettings, fine_tuning_job_id: JobId) -> FineTuningJob:
    return answer(key_limits.resume_within_limits(session, fine_tuning_job_id, settings))


@router.get(
    "/{fine_tuning_job_id}/events",
    summary="List a job's events, newest first",
    response_model=Page[FineTuningEvent],
)
async def list_events(
    respond: ResultsAnswer,
    database: CurrentDatabase,
    fine_tuning_job_id: JobId,
    limit: Limit = 20,
    after: AfterEvent = None,
) -> Response:
    """Messages, and an event of type `metrics` for every step."""

    def listed() -> Page[FineTuningEvent]:
        with database.reading() as session:
            return _events(session, fine_tuning_job_id, limit, after)

    return await respond(listed)


def _events(session: Session, job_id: str, limit: int, after: str | None) -> Page[FineTuningEvent]:
    transitions.get(session, job_id)
    query = select(JobEvent).where(JobEvent.job_id == job_id)
    messages = page(session, query, JobEvent.id, limit, after, _event)
    metrics = _metrics(session, job_id, limit, after)
    both = sorted([*messages.data, *metrics], key=lambda event: event.id, reverse=True)
    data = both[:limit]
    return Page(
        data=data,
        has_more=messages.has_more or len(both) > limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


@router.get(
    "/{fine_tuning_job_id}/checkpoints",
    summary="A job's checkpoints, newest first",
    response_model=Page[FineTuningCheckpoint],
)
async def list_checkpoints(
    respond: ResultsAnswer,
    database: CurrentDatabase,
    settings: CurrentSettings,
    fine_tuning_job_id: JobId,
    limit: Limit = 10,
    after: AfterCheckpoint = None,
) -> Response:
    """The checkpoints that still exist: older ones are deleted."""

    def listed() -> Page[FineTuningCheckpoint]:
        with database.reading() as session:
            job = transitions.get(session, fine_tuning_job_id)
            kept = [_checkpoint(job, each) for each in checkpoints.list_checkpoints(session, settings, job)]
            return page_of(kept, lambda each: each.id, limit, after)

    return await respond(listed)


def answer(job: Job) -> FineTuningJob:
    """A job in OpenAI's shape."""
    spec = Spec.model_validate(job.spec)
    base = openai_base_rate(spec.objective, adapters=spec.method.lora is not None)
    multiplier = job.training_config["learning_rate"] / base
    hyperparameters = HyperparametersResponse(
        n_epochs=spec.epochs or "auto",
        batch_size=spec.effective_batch_size,
        learning_rate_multiplier=float(f"{multiplier:.12g}"),  # 3, not 3.0000000000000004
    )
    made = job.status == "succeeded" and bool(job.result["files"])
    left = job.progress.get("eta_seconds") if job.status == "running" else None
    validation = spec.data.validation
    return FineTuningJob(
        id=job.id,
        created_at=int(job.created_at),
        finished_at=None if job.finished_at is None else int(job.finished_at),
        model=job.model_name,
        fine_tuned_model=name_of(job) if made else None,
        status=job.status,
        training_file=job.file_id,
        validation_file=validation.file_id if validation is not None else None,
        result_files=[result_file_of(job)] if job.status == "succeeded" else [],
        hyperparameters=hyperparameters,
        method=_method(spec, hyperparameters),
        seed=spec.seed,
        trained_tokens=job.result["trained_tokens"] if job.status == "succeeded" else None,
        estimated_finish=None if left is None else int(time.time() + left),
        error=FineTuningError(**job.error) if job.error else None,
        metadata=job.client_metadata,
    )


def _method(spec: Spec, hyperparameters: HyperparametersResponse) -> MethodResponse:
    if spec.objective is None:
        return MethodResponse(supervised=SupervisedResponse(hyperparameters=hyperparameters))
    if spec.objective.name != "dpo":
        return MethodResponse(type=spec.objective.name)
    own = DpoHyperparametersResponse(**hyperparameters.model_dump(), beta=spec.objective.beta)
    return MethodResponse(type="dpo", dpo=DpoResponse(hyperparameters=own))


def _event(row: JobEvent) -> FineTuningEvent:
    return FineTuningEvent(
        id=row.id,
        created_at=int(row.created_at),
        level="warn" if row.level == "warning" else row.level,
        message=row.message,
        data={"type": row.type, **row.data},
    )


def _metrics(session: Session, job_id: str, limit: int, after: str | None) -> list[FineTuningEvent]:
    """The newest steps as events, with one more than `limit` if there are more.

    Their ids contain the steps' times, like the ids of all other events, so that all of them sort by time.
    """
    query = select(StepMetric.step, StepMetric.time, StepMetric.loss).where(StepMetric.job_id == job_id)
    if after is not None:
        query = query.where(StepMetric.time <= _time_of(after) + 1e-5)
    newest = session.execute(query.order_by(StepMetric.step.desc()).limit(limit + 2)).all()
    evaluated = evaluations(session, job_id, [step for step, _, _ in newest])
    events = []
    for step, at, loss in newest:
        data = {"step": step, "train_loss": loss}
        if (found := evaluated.get(step)) is not None and found.loss is not None:
            data["valid_loss"] = found.loss
            if found.token_accuracy is not None:
                data["valid_mean_token_accuracy"] = found.token_accuracy
            if found.exact_match is not None:
                data["valid_exact_match"] = found.exact_match
            for name, value in (found.rewards or {}).items():
                if value is not None:
                    data[f"valid_reward_{name}"] = value
        event_id = f"ftevent-{int(at * 1e6):014x}{step:012x}"
        if after is None or event_id < after:
            message = f"Step {step}: training loss={loss:.4f}"
            events.append(
                FineTuningEvent(
                    id=event_id, created_at=int(at), level="info", message=message, type="metrics", data=data
                )
            )
    return events[: limit + 1]


def _time_of(event_id: str) -> float:
    """The Unix time in an event's id; infinity if it is not an id."""
    try:
        return int(event_id.removeprefix("ftevent-")[:14], 16) / 1e6
    except ValueError:
        return float(2**40)


def _checkpoint(job: Job, each: Checkpoint) -> FineTuningCheckpoint:
    return FineTuningCheckpoint(
        id=each.id,
        created_at=each.created_at,
        fine_tuned_model_checkpoint=f"{name_of(job)}:ckpt-step-{each.step}",
        fine_tuning_job_id=job.id,
        step_number=each.step,
        metrics=CheckpointMetrics(
            step=each.step,
            train_loss=each.train_loss,
            full_valid_loss=each.evaluation.loss,
            full_valid_mean_token_accuracy=each.evaluation.token_accuracy,
        ),
    )
