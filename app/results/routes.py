"""Routes for a job's results: series, log, completions, profile and model."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json

from app.contract.reports import MOST_MICRO_LOSSES, MOST_NORMS, LogLine
from app.contract.states import ENDED
from app.errors import Conflict, NotFound
from app.jobs import reads, transitions
from app.jobs.parent_jobs import is_model_deleted
from app.results import run_files
from app.results.csv_export import csv_lines, csv_response
from app.results.schemas import CompletionsResponse, Metrics, Profile
from app.results.series import Evaluation, evaluations, last_step, pages_of, series
from app.settings import Settings
from app.storage.database import Database
from app.web.dependencies import (
    CurrentDatabase,
    CurrentSettings,
    Fetching,
    JobId,
    ResultsAnswer,
    ResultsInTurns,
    SendStream,
    Slowly,
    StreamOf,
    in_thread,
)
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router("/training", tags=["training"], route_class=SessionRoute)


@router.get("/{training_id}/metrics", summary="A job's series", response_model=Metrics)
async def metrics(
    slowly: Slowly,
    in_turns: ResultsInTurns,
    database: CurrentDatabase,
    stream: StreamOf,
    training_id: JobId,
    from_step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    points: Annotated[
        int | None, Query(ge=2, le=10_000, description="Maximum number of points, evenly spread")
    ] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",
) -> Response:
    """One point per step or, with `points`, evenly spread points including the first and last; of very many
    or very long ones, without the figures of micro-batches, layers and ranks. JSON also
    lists the evaluations from `from_step` on; CSV has them as columns of the steps that it lists."""

    def read() -> tuple[list[dict[str, Any]] | None, int, dict[int, Evaluation]]:
        with database.connecting() as connection:
            reads.row(connection, training_id, database.viewer.owner)
            lines = None if points is None else series(connection, training_id, from_step, points)
            return lines, last_step(connection, training_id), evaluations(connection, training_id)

    lines, steps, evaluated = await slowly(read)  # many steps, and all evaluations
    pages = pages_of(database, training_id, from_step) if lines is None else [lines]
    if format == "csv":
        return csv_response(in_turns(csv_lines(pages, evaluated)), training_id, stream)
    found = [{"step": step, **each._asdict()} for step, each in evaluated.items() if step >= from_step]
    answer = {"training_id": training_id, "steps": steps, "evaluations": found}
    if lines is not None:
        content = await slowly(lambda: to_json({**answer, "data": lines}, inf_nan_mode="null"))
        return Response(content, media_type="application/json")
    return stream(in_turns(_as_json(answer, pages)), media_type="application/json")


@router.get("/{training_id}/log", summary="A job's log as JSON lines", response_class=StreamingResponse)
async def log(
    in_turns: ResultsInTurns,
    database: CurrentDatabase,
    stream: StreamOf,
    training_id: JobId,
    from_step: Annotated[int, Query(ge=0, lt=2**31, description="The first step to include")] = 0,
) -> Response:
    await in_thread(partial(_check_exists, database, training_id))
    lines = _log_lines(database, training_id, from_step)
    return stream(in_turns(lines), media_type="application/jsonl")


@router.get(
    "/{training_id}/completions",
    summary="How the model completes held-out prompts, before and after training",
    response_model=CompletionsResponse,
)
async def completions(
    respond: ResultsAnswer, database: CurrentDatabase, settings: CurrentSettings, training_id: JobId
) -> Response:
    """Completions of held-out prompts; empty if there are none, or none has been completed yet."""

    def read() -> CompletionsResponse:
        _check_exists(database, training_id)
        found = run_files.completions(settings, training_id)
        return CompletionsResponse(training_id=training_id, data=list(found.data))

    return await respond(read)


@router.get(
    "/{training_id}/profile",
    summary="Where the time of one window went, operator by operator",
    response_model=Profile,
)
async def profile(
    respond: ResultsAnswer, database: CurrentDatabase, settings: CurrentSettings, training_id: JobId
) -> Response:
    """The profile of a job that was submitted with `profile`, after its third step."""

    def read() -> Profile:
        _check_exists(database, training_id)
        found = run_files.operators(settings, training_id)
        if found is None:
            raise NotFound(
                f"Job {training_id} has no profile: submit with profile: true, and wait for its third step."
            )
        files = run_files.profile_files(settings, training_id)
        return Profile(training_id=training_id, operators=list(found.data), files=files)

    return await respond(read)


@router.get(
    "/{training_id}/profile/{name}",
    summary="A profile's trace, or its snapshot of a GPU's memory",
    response_class=StreamingResponse,
)
def profile_file(
    database: CurrentDatabase,
    settings: CurrentSettings,
    stream: StreamOf,
    training_id: JobId,
    name: Literal["trace.json", "memory.pickle"],
) -> Response:
    _check_exists(database, training_id)
    file = run_files.profile_file(settings, training_id, name)
    if file is None:
        raise NotFound(f"Job {training_id} has no {name}: GET …/profile lists the available files.")
    return stream(
        run_files.blocks_of(file),
        file.close,
        media_type="application/json" if name.endswith(".json") else "application/octet-stream",
        headers={
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f'attachment; filename="{training_id}-{name}"',
        },
    )


@router.get("/{training_id}/model", summary="The trained model as a tar", response_class=StreamingResponse)
async def model(
    fetching: Fetching,
    database: CurrentDatabase,
    settings: CurrentSettings,
    stream: StreamOf,
    training_id: JobId,
    replica: Annotated[
        int | None, Query(ge=0, le=1023, description="The independent replica whose model it is")
    ] = None,
) -> Response:
    return await fetching(lambda: _model(database, settings, stream, training_id, replica))


def _model(
    database: Database, settings: Settings, stream: SendStream, training_id: str, replica: int | None
) -> Response:
    with database.reading() as session:
        job = transitions.get(session, training_id)
        session.expunge(job)
    if job.status != "succeeded":
        ended = job.status in ENDED
        what = "has ended without a model" if ended else "has no model yet"
        raise Conflict(f"Job {training_id} is {job.status}: it {what}.")
    if not job.result["files"]:
        raise Conflict(f"Job {training_id} only measured (tune: only), and has no model.")
    if is_model_deleted(job.result):
        raise NotFound(f"The model of job {training_id} has been deleted.")
    named, name = job.result["files"], training_id
    if replica is not None:
        replicas = job.result.get("replicas") or []
        if replica >= len(replicas):
            raise NotFound(f"Job {training_id} has {len(replicas)} replicas: there is no replica {replica}.")
        named, name = replicas[replica]["files"], f"{training_id}-replica-{replica}"
    if len(named) > run_files.MAX_MODEL_FILES:
        raise Conflict(f"The model of job {training_id} has too many files to be downloaded as one.")
    files = run_files.model_files(settings, training_id, named, replica)
    if files is None:
        raise NotFound(f"The model of job {training_id} is no longer in the data folder.")
    return run_files.tar_response(files, name, stream)


def _check_exists(database: Database, training_id: str) -> None:
    """Checks that there is such a job. No session stays open while its files are read, which object storage
    may delay.

    Raises:
        NotFound: there is none.
    """
    with database.reading() as session:
        transitions.get(session, training_id)


def _log_lines(database: Database, training_id: str, from_step: int) -> Iterator[str]:
    for page in pages_of(database, training_id, from_step):
        yield "".join(LogLine.model_validate(_within_bounds(row)).model_dump_json() + "\n" for row in page)


def _within_bounds(row: dict[str, Any]) -> dict[str, Any]:
    """A stored line without lists that are longer than a line's may be now; earlier versions stored them."""
    most = {"micro_losses": MOST_MICRO_LOSSES, "gradient_norms": MOST_NORMS}
    return {**row, **{name: None for name, length in most.items() if len(row[name] or ()) > length}}


def _as_json(whole: dict[str, Any], pages: Iterable[list[dict[str, Any]]]) -> Iterator[bytes]:
    """Streams a JSON object whose `data` array is written page by page."""
    start = to_json(whole, inf_nan_mode="null")
    yield start[:-1] + b',"data":['
    first = True
    for page in pages:
        if page:
            yield (b"" if first else b",") + to_json(page, inf_nan_mode="null")[1:-1]
            first = False
    yield b"]}"
