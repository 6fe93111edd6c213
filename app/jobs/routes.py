"""Routes that submit, read, stop and delete jobs."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import structlog
from fastapi import Header, Request, Response
from fastapi.sse import format_sse_event
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from app.contract.base import Page
from app.contract.reports import WindowProgress
from app.contract.states import ENDED
from app.datasets import lengths
from app.errors import AccrueError
from app.jobs import lifecycle, reads, transitions
from app.jobs.etags import NOT_MODIFIED, AnswerCache, Document, tagged
from app.jobs.filters import Filters
from app.jobs.request_schemas import TrainingRequest
from app.jobs.response_schemas import DryRunResponse, EventResponse, JobResponse
from app.jobs.responses import dry_run_answer, job_answer
from app.jobs.waiting import WaitingReasons
from app.maintenance.retention import delete_job
from app.memory_profiles import profiles
from app.planning.inputs import PlanningInputs
from app.security.authentication import Authenticate
from app.settings import Settings
from app.storage.session import Session
from app.storage.tables import Job, JobEvent
from app.storage.waits import WaitLimiter
from app.submissions import admission, key_limits
from app.submissions.admission import AdmittedRequest
from app.submissions.handler import SubmissionHandler, as_json, submit
from app.submissions.idempotency import IdempotentRequest
from app.web.dependencies import (
    AfterEvent,
    AfterJob,
    CurrentDatabase,
    CurrentIdempotentRequest,
    CurrentSettings,
    InTurn,
    JobId,
    Limit,
    Listing,
    ResultsAnswer,
    Writing,
    in_thread,
    planning_inputs_of,
    slowly_of,
)
from app.web.downloads import ClosingStream
from app.web.event_stream import EventStream
from app.web.pagination import page
from app.web.routers import native_router
from app.web.session_route import SessionRoute

log = structlog.get_logger("accrue.service")

router = native_router("/training", tags=["training"], route_class=SessionRoute)

_DRY_RUN_WAIT_SECONDS = 1.5
"""Seconds that a dry run waits for the samples' lengths, and for a simulation. A submission does not wait:
the worker plans again."""

_ACCEPTED: dict[int | str, dict[str, Any]] = {
    200: {"model": DryRunResponse, "description": "With dry_run: the plan"}
}


@router.post(
    "/with-accumulation",
    status_code=202,
    responses=_ACCEPTED,
    summary="Train with given accumulation steps",
    response_model=JobResponse | DryRunResponse,
)
async def with_accumulation(
    request: Request, requested: TrainingRequest, idempotency: CurrentIdempotentRequest
) -> Response:
    """Queues a job; accumulation steps and micro-batch are used as requested, if they are predicted to fit;
    the rest is planned."""
    return await _submitted(request, requested, idempotency)


@router.post(
    "/large-batch",
    status_code=202,
    responses=_ACCEPTED,
    summary="Train a large batch with planned accumulation steps",
    response_model=JobResponse | DryRunResponse,
)
async def large_batch(
    request: Request, requested: TrainingRequest, idempotency: CurrentIdempotentRequest
) -> Response:
    """Queues a job whose accumulation steps are planned from memory."""
    return await _submitted(request, requested, idempotency, planned=True)


@router.get("", summary="List jobs", response_model=Page[JobResponse])
async def list_jobs(
    request: Request,
    database: CurrentDatabase,
    listing: Listing,
    in_turn: InTurn,
    filters: Filters,
    limit: Limit = 20,
    after: AfterJob = None,
) -> Response:
    """Newest first; filter by `status`, `user_id`, `model`, `since`, `until` and `metadata[key]=value`."""
    query = reads.JOBS.where(*filters)
    answer_cache: AnswerCache = request.app.state.answer_cache

    def listed() -> Response:
        with database.connecting() as connection:
            waiting = WaitingReasons(connection)
            rows = reads.page(connection, query, database.viewer.owner, limit, after)
            return answer_cache.page_response("native", rows, limit, lambda job: job_answer(waiting, job))

    return await (listing(listed) if filters else in_turn(listed))  # filters may read all jobs of a key


@router.get("/{training_id}", summary="A job", response_model=JobResponse, responses=NOT_MODIFIED)
async def get(request: Request, training_id: JobId) -> Response:
    owner = request.state.caller.owner

    answer_cache: AnswerCache = request.app.state.answer_cache

    def read(connection: Connection) -> Document:
        waiting_reasons = WaitingReasons(connection)
        row = reads.row(connection, training_id, owner)
        return answer_cache.document("native", row, lambda job: job_answer(waiting_reasons, job))

    return tagged(request, await request.app.state.immediate_reads.run(read))


@router.post("/{training_id}/cancel", summary="Cancel a job")
def cancel(session: Writing, training_id: JobId) -> JobResponse:
    """A waiting job ends at once; a running one as soon as its worker has stopped it."""
    return _answer(session, lifecycle.cancel(session, training_id))


@router.post("/{training_id}/pause", summary="Pause a job")
def pause(session: Writing, training_id: JobId) -> JobResponse:
    """A running job writes a checkpoint and releases its device."""
    return _answer(session, lifecycle.pause(session, training_id))


@router.post("/{training_id}/stop", summary="End training early, and keep the model")
def stop(session: Writing, training_id: JobId) -> JobResponse:
    """A running job finishes its step and saves its model; for a waiting one, the model of
    its last checkpoint is saved."""
    return _answer(session, lifecycle.stop(session, training_id))


@router.post("/{training_id}/resume", summary="Resume a job that is paused or timed out")
def resume(session: Writing, settings: CurrentSettings, training_id: JobId) -> JobResponse:
    """A job that timed out continues from its last checkpoint, and its `timeout_seconds` starts over."""
    return _answer(session, key_limits.resume_within_limits(session, training_id, settings))


@router.post("/{training_id}/start", summary="Start a job that was submitted with auto_start false")
def start(session: Writing, settings: CurrentSettings, training_id: JobId) -> JobResponse:
    return _answer(session, key_limits.resume_within_limits(session, training_id, settings))


@router.post(
    "/{training_id}/retry",
    status_code=202,
    summary="Retry a failed or cancelled job",
    response_model=JobResponse,
)
def retry(
    database: CurrentDatabase,
    settings: CurrentSettings,
    idempotency: CurrentIdempotentRequest,
    training_id: JobId,
) -> JobResponse | Response:
    """Creates a new job with the same spec; the old job is unchanged."""

    with database.writing() as session:
        replayed = idempotency.replay(session)
        if replayed is not None:
            return replayed
        key_limits.check_limits(session, settings)
        answer = _answer(session, lifecycle.retry(session, training_id))
        idempotency.remember(session, answer, 202)
    return answer


@router.delete("/{training_id}", status_code=204, summary="Delete an ended job and its files")
def delete(database: CurrentDatabase, settings: CurrentSettings, training_id: JobId) -> None:
    delete_job(database, settings, training_id)


@router.get(
    "/{training_id}/events",
    summary="List a job's events, newest first, or stream them",
    response_model=Page[EventResponse],
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "A page; or, with Accept: text/event-stream, every event as it happens",
        },
        204: {"description": "The job has ended, and nothing came after Last-Event-ID"},
    },
)
async def events(
    request: Request,
    respond: ResultsAnswer,
    database: CurrentDatabase,
    training_id: JobId,
    limit: Limit = 20,
    after: AfterEvent = None,
    accept: Annotated[str, Header(max_length=1000)] = "*/*",
    last_event_id: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    """With `Accept: text/event-stream`, the answer is a stream of server-sent events, oldest first, each with
    its id. It starts with the first event, or after `Last-Event-ID`, and ends with the job. While a window
    takes longer than a second, events named `progress`, without an id, report its progress once a second."""
    query = select(JobEvent).where(JobEvent.job_id == training_id)

    def read_page() -> Page[EventResponse]:
        with database.reading() as session:
            transitions.get(session, training_id)
            return page(session, query, JobEvent.id, limit, after, _event)

    def is_over() -> bool:
        with database.reading() as session:
            has_ended = transitions.get(session, training_id).status in ENDED
            later = select(JobEvent.id).where(JobEvent.job_id == training_id, JobEvent.id > last_event_id)
            return has_ended and session.scalar(later.limit(1)) is None

    if "text/event-stream" not in accept:
        return await respond(read_page)
    if await in_thread(is_over):
        return Response(status_code=204)  # tells a browser's EventSource not to reconnect
    stream: EventStream = request.app.state.events
    follower = stream.join(training_id, last_event_id, request.state.caller.key_id)
    return ClosingStream(
        _as_sent_events(request, stream.follow(follower)),
        partial(stream.leave, follower),  # the client may be gone before the first event
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _as_sent_events(
    request: Request, events: AsyncIterator[JobEvent | WindowProgress | None]
) -> AsyncIterator[bytes]:
    """Formats events for a stream, until the job ends or the client's key is revoked."""
    authenticate: Authenticate = request.app.state.authenticate
    async for event in events:
        try:
            await authenticate(request)
        except AccrueError:
            return
        except SQLAlchemyError:
            log.warning("the key of an event stream could not be checked again", exc_info=True)
        if event is None:
            yield format_sse_event(comment="still here")
        elif isinstance(event, WindowProgress):  # no id: clients must not resume from it
            yield format_sse_event(event="progress", data_str=event.model_dump_json(exclude_none=True))
        else:
            yield format_sse_event(id=event.id, data_str=_event(event).model_dump_json())


async def _submitted(
    request: Request, requested: TrainingRequest, idempotency: IdempotentRequest, *, planned: bool = False
) -> Response:
    inputs, settings = planning_inputs_of(request), request.app.state.settings
    handler = _Handler(requested, inputs, settings, idempotency, planned=planned)
    if requested.dry_run:
        checked = await _dry_run(request, handler)
        known = checked.speed, checked.tokens
        return as_json(dry_run_answer(checked.submission, *known, settings.gpu_hour_cost), 200)
    return await submit(handler, request.app.state.group_commit, slowly_of(request))


async def _dry_run(request: Request, handler: "_Handler") -> AdmittedRequest:
    """Waits a moment for the samples' lengths, and for a simulation, unless too many requests are waiting
    already."""
    slowly = slowly_of(request)
    waits: WaitLimiter = request.app.state.waits
    key_id = request.state.caller.key_id
    [checked] = await slowly(handler.check)
    if checked.measuring is not None and waits.has_place(key_id):
        with waits.place(key_id):
            await lengths.wait_for(
                handler.inputs.database, checked.measuring, _DRY_RUN_WAIT_SECONDS, request.is_disconnected
            )
        [checked] = await slowly(handler.check)
    if checked.submission.plan.source != "formula" or not waits.has_place(key_id):
        return checked
    with waits.place(key_id):
        await profiles.wait_for(
            handler.inputs.database, checked.profile_key, _DRY_RUN_WAIT_SECONDS, request.is_disconnected
        )
    [checked] = await slowly(handler.check)
    return checked


class _Handler(SubmissionHandler):
    status = 202

    def __init__(
        self,
        requested: TrainingRequest,
        inputs: PlanningInputs,
        settings: Settings,
        idempotency: IdempotentRequest,
        *,
        planned: bool,
    ) -> None:
        super().__init__(inputs, settings, idempotency)
        self._requested, self._planned = requested, planned

    def is_slow(self) -> bool:
        requested = self._requested
        return admission.is_slow(requested.model_name, requested.dataset_config, self.settings)

    def check(self) -> list[AdmittedRequest]:
        return [admission.check(self._requested, self.inputs, self.settings, planned=self._planned)]

    def answer(self, session: Session, jobs: list[Job]) -> JobResponse:
        return _answer(session, jobs[0])


def _answer(session: Session, job: Job) -> JobResponse:
    return job_answer(WaitingReasons.within(session), job)


def _event(row: JobEvent) -> EventResponse:
    return EventResponse(
        id=row.id,
        created_at=int(row.created_at),
        level=row.level,
        type=row.type,
        message=row.message,
        data=row.data,
    )
