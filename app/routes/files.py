"""Training files, on the OpenAI-compatible surface."""

from typing import Annotated, Literal

from fastapi import APIRouter, Form, Path, UploadFile
from fastapi.responses import FileResponse
from sqlalchemy import select

from app import files
from app.models import File
from app.routes.dependencies import After, CurrentDatabase, CurrentSettings, Limit, Reading
from app.routes.pages import page
from app.schemas.files import FileAnswer, FileDeleted
from app.schemas.wire import Page

router = APIRouter(prefix="/v1/files", tags=["files"])

FileId = Annotated[str, Path(max_length=100, description="file-…")]


@router.post("", summary="Upload a training file")
def upload(
    database: CurrentDatabase,
    settings: CurrentSettings,
    file: UploadFile,
    purpose: Annotated[Literal["fine-tune"], Form()] = "fine-tune",
) -> FileAnswer:
    """JSONL of chats, prompts with completions, or texts; every line is checked."""
    with files.incoming(settings) as (file_id, path):
        checked = files.store_upload(file.file, path, settings)
        with database.writing() as session:
            name = (file.filename or "upload.jsonl")[-200:]
            return answer(files.add(session, file_id, checked, filename=name, purpose=purpose))


@router.get("", summary="List files")
def list_files(
    session: Reading, limit: Limit = 20, after: After = None, purpose: str | None = None
) -> Page[FileAnswer]:
    query = select(File).where(File.inline.is_(False))
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    return page(session, query, File.id, limit, after, answer)


@router.get("/{file_id}", summary="A file")
def get(session: Reading, file_id: FileId) -> FileAnswer:
    return answer(files.get(session, file_id))


@router.get("/{file_id}/content", summary="A file's content", response_class=FileResponse)
def content(session: Reading, settings: CurrentSettings, file_id: FileId) -> FileResponse:
    file = files.get(session, file_id)
    return FileResponse(settings.files_dir / file.id, media_type="application/jsonl", filename=file.filename)


@router.delete("/{file_id}", summary="Delete a file")
def delete(database: CurrentDatabase, settings: CurrentSettings, file_id: FileId) -> FileDeleted:
    with database.writing() as session:
        files.remove(session, file_id)
    (settings.files_dir / file_id).unlink(missing_ok=True)
    return FileDeleted(id=file_id)


def answer(row: File) -> FileAnswer:
    return FileAnswer(
        id=row.id,
        bytes=row.bytes,
        created_at=int(row.created_at),
        filename=row.filename,
        purpose=row.purpose,
        format=row.format,
        examples=row.examples,
    )
