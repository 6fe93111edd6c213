"""Training files, on the OpenAI-compatible surface."""

import re
from email.utils import formatdate
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal, get_args

from anyio import to_thread
from fastapi import Form, Path, Query, Request, UploadFile
from fastapi.responses import FileResponse, Response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Select, select
from starlette.datastructures import FormData

from app.contract.base import Page
from app.contract.row_shapes import ColumnField
from app.contract.text import is_storable
from app.datasets import files
from app.datasets.content import store_upload
from app.datasets.dataset_config import Columns
from app.datasets.file_types import ReadOptions, SampleBy
from app.datasets.schemas import FileDeleted, FileObject
from app.errors import Conflict, NotFound, Unprocessable
from app.maintenance.retention import delete_file
from app.models.trained_models import RESULT_FILE, job_of_result_file, result_file_of
from app.results.csv_export import csv_bytes, csv_of_job, csv_response
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import File, Job
from app.submissions.idempotency import IdempotentRequest
from app.web.dependencies import (
    AfterFile,
    CurrentDatabase,
    CurrentIdempotentRequest,
    CurrentSettings,
    Fetching,
    FileOf,
    Listing,
    SendFile,
    SendStream,
    Slowly,
    StreamOf,
)
from app.web.forms import SmallFormRoute
from app.web.pagination import page
from app.web.routers import openai_router

router = openai_router("/v1/files", tags=["OpenAI: files"], route_class=SmallFormRoute)

RESULTS = "fine-tune-results"

FileId = Annotated[str, Path(max_length=100, description="file-…")]


@router.post("", summary="Upload a training file", response_model=FileObject)
async def upload(
    slowly: Slowly,
    database: CurrentDatabase,
    settings: CurrentSettings,
    idempotency: CurrentIdempotentRequest,
    request: Request,
    file: UploadFile,
    purpose: Annotated[Literal["fine-tune"], Form()] = "fine-tune",
    columns: Annotated[
        str | None,
        Form(
            max_length=4096,
            description='Which column holds which field, as JSON: {"prompt": "question", "completion": '
            '"answer"}; or one form field each: columns[prompt]=question',
        ),
    ] = None,
    sample_by: Annotated[
        SampleBy, Form(description="What becomes one sample of a plain text file")
    ] = "document",
) -> FileObject | Response:
    """JSON lines, JSON, CSV, Parquet or plain text, with chats, prompts with completions, texts, pairs of
    answers, labelled answers, or labelled texts; also in Alpaca's and ShareGPT's shapes. Every sample is
    checked. JSON lines are stored as they are; other kinds of files, and files whose columns are assigned,
    are stored as JSON lines."""
    name = (file.filename or "upload.jsonl")[-200:]
    if not is_storable(name):
        raise Unprocessable("The file's name has a NUL character or a lone surrogate.", field="file")
    form = await request.form()
    _check_fields(form)
    how = ReadOptions(_columns(columns, form), sample_by)
    return await slowly(lambda: _stored(database, settings, idempotency, file.file, name, purpose, how))


_FIELDS = ("file", "purpose", "columns", "sample_by")


def _check_fields(form: FormData) -> None:
    """Rejects fields that an upload does not have, which would be ignored otherwise.

    Raises:
        Unprocessable: there is one.
    """
    for name in form:
        if name not in _FIELDS and not name.lower().startswith("column"):
            expiry = " Files have no expiry dates here." if name.startswith("expires_after") else ""
            raise Unprocessable(
                f"Unknown field {name[:100]!r}; an upload has {', '.join(_FIELDS)}.{expiry}",
                field=name[:100] if is_storable(name) else "file",
            )


_COLUMNS: TypeAdapter[Columns] = TypeAdapter(Columns)
_COLUMN_FIELD = re.compile(r"columns\[(\w+)\]")


def _columns(given: str | None, form: FormData) -> dict[ColumnField, str]:
    """The assigned columns of an upload, given as JSON or as one form field each.

    Raises:
        Unprocessable: they are not what `Columns` allows.
    """
    unknown = [
        key for key in form if key.lower().startswith("column") and key != "columns"
        and not _COLUMN_FIELD.fullmatch(key)
    ]  # fmt: skip
    if unknown or (given and any(map(_COLUMN_FIELD.fullmatch, form))):
        raise Unprocessable(
            "columns: give one form field, columns, with JSON; or one for each field, as in "
            "columns[prompt]=question.",
            field="columns",
        )
    single = {match[1]: value for key, value in form.items() if (match := _COLUMN_FIELD.fullmatch(key))}
    try:
        found = _COLUMNS.validate_json(given) if given else _COLUMNS.validate_python(single)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = "".join(f"[{str(part)[:100]}]" for part in first["loc"] if part != "[key]")
        raise Unprocessable(
            f'columns{where}: {first["msg"]}. Expected an object such as {{"prompt": "question", '
            f'"completion": "answer"}}, whose keys are among {", ".join(get_args(ColumnField))}.',
            field="columns",
        ) from None
    if not all(map(is_storable, found.values())):
        raise Unprocessable("columns: a name has a NUL character or a lone surrogate.", field="columns")
    return found


def _stored(
    database: Database,
    settings: Settings,
    idempotency: IdempotentRequest,
    content: BinaryIO,
    name: str,
    purpose: str,
    how: ReadOptions,
) -> FileObject | Response:
    with files.incoming(settings) as path:
        checked = store_upload(content, path, settings, name, how)
        duplicate_id = files.find_duplicate(database, path, checked)
        idempotency = idempotency.with_content(f"{name} {checked.sha256}")
        stored_files.store_file(settings, path)
        with database.writing() as session:
            replayed = idempotency.replay(session)
            if replayed is None:
                row = files.add(
                    session, path, checked, filename=name, purpose=purpose, duplicate_id=duplicate_id,
                    most_bytes=settings.max_stored_bytes,
                )  # fmt: skip
                made = answer(row)
                idempotency.remember(session, made)
        if replayed is not None:
            files.discard(settings, path)  # a repeated request: the file is stored under another id
            return replayed
    return made


FileLimit = Annotated[int, Query(ge=1, le=10_000, description="Maximum number of files")]
"""As many as OpenAI's interface allows."""

_MOST_RESULTS = 100
"""The maximum number of result files in a list: the size of each is counted separately."""

_MOST_AT_ONCE = 1000
_MANY = 100
"""Longer lists count as slow requests."""


@router.get("", summary="List files", response_model=Page[FileObject])
async def list_files(
    slowly: Slowly,
    listing: Listing,
    database: CurrentDatabase,
    limit: FileLimit = 20,
    after: AfterFile = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Uploaded files, the newest first unless `order=asc`, at most 1,000 at a time; with
    `purpose=fine-tune-results`, the step metrics of jobs that succeeded, at most 100 at a time."""
    oldest_first = order == "asc"
    if purpose == RESULTS:
        most = min(limit, _MOST_RESULTS)
        return await slowly(lambda: _as_json(_list_results(database, most, after, oldest_first)))
    query = select(File).where(File.inline.is_(False))
    if purpose is not None:
        query = query.where(File.purpose == purpose)

    def listed() -> Response:
        return _as_json(_page(database, query, min(limit, _MOST_AT_ONCE), after, oldest_first))

    return await (slowly(listed) if limit > _MANY else listing(listed))


def _page(
    database: Database, query: "Select[Any]", limit: int, after: str | None, oldest_first: bool
) -> Page[FileObject]:
    with database.reading() as session:
        return page(session, query, File.id, limit, after, answer, oldest_first=oldest_first)


def _as_json(page: Page[FileObject]) -> Response:
    """The response, serialised in the caller's thread: FastAPI would do it in the event loop."""
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{file_id}", summary="A file")
async def get(slowly: Slowly, database: CurrentDatabase, file_id: FileId) -> FileObject:
    job_id = job_of_result_file(file_id)
    if job_id is not None:
        return await slowly(lambda: _result_of_job(database, job_id))
    return await to_thread.run_sync(_uploaded, database, file_id)


def _uploaded(database: Database, file_id: str) -> FileObject:
    with database.reading() as session:
        return answer(files.get(session, file_id))


def _result_of_job(database: Database, job_id: str) -> FileObject:
    with database.reading() as session:
        ended = _succeeded_job(session, job_id)
    return _result(database, ended)


@router.get("/{file_id}/content", summary="A file's content", response_class=FileResponse)
async def content(
    fetching: Fetching,
    database: CurrentDatabase,
    settings: CurrentSettings,
    stream: StreamOf,
    send: FileOf,
    file_id: FileId,
) -> Response:
    return await fetching(lambda: _content(database, settings, stream, send, file_id))


def _content(
    database: Database, settings: Settings, stream: SendStream, send: SendFile, file_id: str
) -> Response:
    job_id = job_of_result_file(file_id)
    with database.reading() as session:
        file = files.get(session, file_id) if job_id is None else None
        ended = None if job_id is None else _succeeded_job(session, job_id)
    if ended is not None:  # the rows are read page by page, and no connection is held between pages
        return csv_response(csv_of_job(database, ended.id), ended.id, stream)
    assert file is not None
    try:
        stored = stored_files.path_of_file(settings, file.id).open("rb")  # closed once it is sent
    except FileNotFoundError:
        message = f"The content of file {file_id} is no longer in the data folder."
        raise NotFound(message) from None
    # Equal files of several keys share their content, whose own time is that of the first upload.
    headers = {"last-modified": formatdate(file.created_at, usegmt=True), "etag": f'"{file.id}"'}
    return send(stored, media_type="application/jsonl", filename=file.filename, headers=headers)


@router.delete("/{file_id}", summary="Delete a file")
async def delete(
    slowly: Slowly, database: CurrentDatabase, settings: CurrentSettings, file_id: FileId
) -> FileDeleted:
    if (job_id := job_of_result_file(file_id)) is not None:
        raise Conflict(
            f"The file {file_id} is part of job {job_id} and is deleted with it: delete the job instead."
        )
    await slowly(partial(delete_file, database, settings, file_id))
    return FileDeleted(id=file_id)


def answer(row: File) -> FileObject:
    return FileObject(
        id=row.id,
        bytes=row.bytes,
        created_at=int(row.created_at),
        filename=row.filename,
        purpose=row.purpose,
        format=row.format,
        examples=row.examples,
        classes=row.classes,
        sha256=row.sha256,
    )


def _list_results(database: Database, limit: int, after: str | None, oldest_first: bool) -> Page[FileObject]:
    query = select(Job).where(Job.status == "succeeded")
    last = after and (job_of_result_file(after) or after)
    jobs: list[Job] = []

    def noted(job: Job) -> FileObject:
        jobs.append(job)
        return _result_without_size(job)

    with database.reading() as session:
        found = page(session, query, Job.id, limit, last, noted, oldest_first=oldest_first)
    data = [_result(database, job) for job in jobs]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return found.model_copy(update={"data": data, "first_id": first_id, "last_id": last_id})


def _succeeded_job(session: Session, job_id: str) -> Job:
    job = session.get(Job, job_id)
    if job is None or job.status != "succeeded":
        raise NotFound(f"No file has the id {RESULT_FILE}{job_id.removeprefix('ftjob-')}.")
    return job


def _result(database: Database, job: Job) -> FileObject:
    """Describes a job's step metrics as a file. Call it outside a session: counting the bytes opens its
    own."""
    return _result_without_size(job).model_copy(update={"bytes": csv_bytes(database, job.id)})


def _result_without_size(job: Job) -> FileObject:
    return FileObject(
        id=result_file_of(job),
        bytes=0,
        created_at=int(job.finished_at or job.created_at),
        filename="step_metrics.csv",
        purpose=RESULTS,
        format=None,
        examples=None,
    )
