"""What a job's trainer measured: its series, its log, its model."""

from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic_core import to_json
from sqlalchemy.orm import Session

from app.contract.reports import LogLine
from app.contract.states import ENDED
from app.errors import Conflict, NotFound
from app.jobs import lifecycle, reads
from app.results import run_files
from app.results.csv_export import csv_response
from app.results.run_files import model_dir, tar_of, tar_size
from app.results.schemas import CompletionsAnswer, Metrics, Profile
from app.results.series import each_step, last_step, series, validation_losses
from app.web.dependencies import CurrentDatabase, CurrentSettings, JobId, Reading

router = APIRouter(prefix="/training", tags=["training"])


@router.get("/{training_id}/metrics", summary="A job's series", response_model=Metrics)
def metrics(
    database: CurrentDatabase,
    training_id: JobId,
    from_step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    points: Annotated[
        int | None, Query(ge=2, le=10_000, description="At most so many, evenly spread")
    ] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",
) -> Response:
    """A point per step, or fewer, evenly spread with the first and the last; and every evaluation."""
    with database.glancing() as connection:
        reads.row(connection, training_id, database.owner)
        lines = series(connection, training_id, from_step, points)
        steps = last_step(connection, training_id)
        evaluated = validation_losses(connection, training_id)
    if format == "csv":
        return csv_response(lines, training_id, evaluated)
    evaluations = [{"step": step, "loss": loss} for step, loss in evaluated.items() if step >= from_step]
    answer = {"training_id": training_id, "steps": steps, "data": lines, "evaluations": evaluations}
    return Response(to_json(answer, inf_nan_mode="null"), media_type="application/json")


@router.get("/{training_id}/log", summary="A job's log as JSON lines", response_class=StreamingResponse)
def log(
    database: CurrentDatabase,
    training_id: JobId,
    from_step: Annotated[int, Query(ge=0, lt=2**31, description="The first step to tell of")] = 0,
) -> StreamingResponse:
    with database.reading() as session:
        lifecycle.get(session, training_id)
    return StreamingResponse(_log_lines(database, training_id, from_step), media_type="application/jsonl")


@router.get(
    "/{training_id}/completions",
    summary="What the model makes of held-back prompts, before and after training",
)
def completions(session: Reading, settings: CurrentSettings, training_id: JobId) -> CompletionsAnswer:
    """Of samples that it did not learn from; empty without any, or before the first was completed."""
    lifecycle.get(session, training_id)
    found = run_files.completions(settings, training_id)
    return CompletionsAnswer(training_id=training_id, data=list(found.data))


@router.get("/{training_id}/profile", summary="Where the time of one window went, operator by operator")
def profile(session: Reading, settings: CurrentSettings, training_id: JobId) -> Profile:
    """Of a job that was submitted with `profile`, once its third step is made."""
    lifecycle.get(session, training_id)
    found = run_files.operators(settings, training_id)
    if found is None:
        raise NotFound(
            f"Job {training_id} has no profile: submit with profile: true, and wait for its third step."
        )
    files = [
        name
        for name in run_files.PROFILE_FILES
        if run_files.profile_file(settings, training_id, name) is not None
    ]
    return Profile(training_id=training_id, operators=list(found.data), files=files)


@router.get(
    "/{training_id}/profile/{name}",
    summary="A profile's trace, or its snapshot of a GPU's memory",
    response_class=FileResponse,
)
def profile_file(
    session: Reading,
    settings: CurrentSettings,
    training_id: JobId,
    name: Literal["trace.json", "memory.pickle"],
) -> FileResponse:
    lifecycle.get(session, training_id)
    path = run_files.profile_file(settings, training_id, name)
    if path is None:
        raise NotFound(f"Job {training_id} has no {name}: GET …/profile lists what there is.")
    return FileResponse(path, filename=f"{training_id}-{name}")


@router.get("/{training_id}/model", summary="The trained model as a tar", response_class=StreamingResponse)
def model(session: Reading, settings: CurrentSettings, training_id: JobId) -> StreamingResponse:
    job = lifecycle.get(session, training_id)
    if job.status != "succeeded":
        ended = job.status in ENDED
        what = "has ended without a model" if ended else "has no model yet"
        raise Conflict(f"Job {training_id} is {job.status}: it {what}.")
    if not job.result["files"]:
        raise Conflict(f"Job {training_id} only measured (tune: only): no model came of it.")
    folder = model_dir(settings, training_id)
    if not folder.is_dir():
        raise NotFound(f"The model of job {training_id} is no longer in the data folder.")
    return StreamingResponse(
        tar_of(folder, training_id),
        media_type="application/x-tar",
        headers={
            "Content-Length": str(tar_size(folder)),
            "Content-Disposition": f'attachment; filename="{training_id}.tar"',
        },
    )


def _log_lines(database: CurrentDatabase, training_id: str, from_step: int) -> Iterator[str]:
    with database.reading() as session:
        yield from _lines(session, training_id, from_step)


def _lines(session: Session, training_id: str, from_step: int) -> Iterator[str]:
    for row in each_step(session, training_id, from_step):
        yield LogLine.model_validate(row).model_dump_json() + "\n"
