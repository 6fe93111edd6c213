"""Training files, stored under their ids; duplicates share one copy (what is in them: `content.py`)."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import BindParameter, Connection, Select, String, bindparam, func, or_, select
from sqlalchemy.exc import DBAPIError

from app.datasets import content
from app.errors import Conflict, NotFound, QuotaExceeded
from app.settings import Settings
from app.storage import stored_files, unsettled_files
from app.storage.compiled import CompiledStatement
from app.storage.database import Database, database_now, lock_until_commit
from app.storage.ids import new_id
from app.storage.session import OF_EVERYONE, Session
from app.storage.tables import File, Job

_MAX_COMPARED_NAMES = 100
_MAX_VERIFIED_COPIES = 3
"""The most stored copies that are verified when another file with the same content arrives; usually there is
one copy, with many names."""

log = structlog.get_logger("accrue.service")


@contextmanager
def incoming(settings: Settings) -> Iterator[Path]:
    """The path of a new file, named by its id; the file is removed if the block raises.

    If the database connection was lost, the commit may have succeeded, so the file is kept. The service's
    next start removes it if no row refers to it (maintenance/data_folder.py).
    """
    path = settings.files_dir / new_id("file")
    try:
        yield path
    except BaseException as error:
        if not (isinstance(error, DBAPIError) and error.connection_invalidated):
            discard(settings, path)
        raise
    if path.exists():
        unsettled_files.settle(path)


def discard(settings: Settings, path: Path) -> None:
    """Deletes a new file that gets no row. If the object storage cannot be used, the next start of the
    service tries again."""
    if not path.exists() or stored_files.remove_file(settings, path.name):
        unsettled_files.settle(path)


def add(
    session: Session,
    path: Path,
    checked: content.CheckedFile,
    *,
    filename: str,
    purpose: str,
    duplicate_id: str | None = None,
    inline: bool = False,
    most_bytes: int | None = None,
) -> File:
    """Adds the row of a stored file, whose name on disk is its id.

    Args:
        duplicate_id: the id that `find_duplicate` returned, or None.
        most_bytes: the maximum size of all files of the key together; None for no limit.

    Raises:
        QuotaExceeded: the key's files would be larger than that.
    """
    if most_bytes is not None:
        _check_room(session, checked.bytes, most_bytes)
    _link_duplicate(path, duplicate_id)
    file = File(
        id=path.name,
        created_at=session.scalar(select(database_now())),
        filename=filename,
        purpose=purpose,
        bytes=checked.bytes,
        sha256=checked.sha256,
        format=checked.format,
        examples=checked.examples,
        classes=None if checked.classes is None else list(checked.classes),
        inline=inline,
    )
    session.add(file)
    session.flush()
    return file


def _check_room(session: Session, more: int, most: int) -> None:
    lock_until_commit(session, f"files of {session.viewer.creator}")
    own = File.owner.is_not_distinct_from(session.viewer.creator)
    stored = session.scalar(select(func.coalesce(func.sum(File.bytes), 0)).where(own)) or 0
    if stored + more > most:
        raise QuotaExceeded(
            f"The files of this key would take {stored + more} bytes, more than {most} "
            "(ACCRUE_MAX_STORED_BYTES): delete some first; those of a job are deleted with it."
        )


def find_duplicate(database: Database, path: Path, checked: content.CheckedFile) -> str | None:
    """Finds a stored file with the same content, whoever owns it. Returns its id, or None.

    The stored file is verified before it is reused, outside of any transaction: a file that was damaged since
    it was stored must not become the content of a new one. A damaged file is repaired instead: its names are
    linked to the new file.
    """
    table = File.__table__
    with database.reading() as session:
        equal = select(table.c.id).where(table.c.sha256 == checked.sha256).order_by(table.c.id.desc())
        equal = equal.limit(_MAX_COMPARED_NAMES)
        names = [path.with_name(file_id) for file_id in session.scalars(equal)]
    by_inode: dict[int, list[Path]] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # it was deleted just now
            by_inode.setdefault(name.stat().st_ino, []).append(name)
    for same in list(by_inode.values())[:_MAX_VERIFIED_COPIES]:
        if content.digest(same[0]) == checked.sha256:
            return same[0].name
        log.error(
            "a stored file was damaged and is replaced by an identical upload",
            files=[each.name for each in same],
        )
        for name in same:
            _link(path, name)
    return None


def _link_duplicate(path: Path, duplicate_id: str | None) -> None:
    """Hard-links a new file to its duplicate: the content stays until the last of the two is deleted."""
    if duplicate_id is not None:
        _link(path.with_name(duplicate_id), path)


def _link(source: Path, name: Path) -> None:
    """Replaces `name` by a hard link to `source`; leaves both unchanged if that is impossible."""
    link = name.with_name(f"{name.name}.link")
    try:
        link.hardlink_to(source)
        link.replace(name)
    except OSError:  # the source was just deleted, or the file system allows no (more) hard links
        link.unlink(missing_ok=True)
        return
    content.sync(name.parent)


def get(session: Session, file_id: str, field: str | None = None) -> File:
    """Returns the file with that id.

    Raises:
        NotFound: no file has that id.
    """
    file = session.get(File, file_id)
    if file is None:
        raise _unknown(file_id, field)
    return file


def read_row(connection: Connection, owner: str | None, file_id: str, field: str) -> Any:
    """A file's id, digest, format, number of examples, name, bytes and classes.

    Args:
        owner: only this owner's files are searched; None searches everyone's.

    Raises:
        NotFound: as in `get`.
    """
    rows = _FILE.run(connection, {"id": file_id, "owner": owner})
    if not rows:
        raise _unknown(file_id, field)
    *values, classes = rows[0]
    return *values, json.loads(classes) if isinstance(classes, str) else classes  # as SQLite keeps JSON


def _file(dialect: str) -> Any:
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    own = or_(owner.is_(None), File.owner == owner)
    columns = (File.id, File.sha256, File.format, File.examples, File.filename, File.bytes, File.classes)
    return select(*columns).where(File.id == bindparam("id"), own)


_FILE = CompiledStatement(_file)


def _unknown(file_id: str, field: str | None) -> NotFound:
    return NotFound(
        f"No file has the id {file_id}: GET /v1/files lists them, POST /v1/files uploads one.", field=field
    )


def remove(session: Session, file_id: str) -> None:
    """Deletes the row of a file that no job uses. The caller unlinks its content after the commit.

    Raises:
        NotFound: no such file.
        Conflict: a job uses it.
    """
    file = get(session, file_id)
    _hold(session, file_id, exclusively=True)
    users = session.execute(_needing(file_id), execution_options=OF_EVERYONE).all()
    if (job_id := next((each for each, owner in users if session.shows(owner)), None)) is not None:
        raise Conflict(f"The file {file_id} is used by job {job_id}: delete that job first.")
    if users:
        raise Conflict(
            f"The file {file_id} is used by a job of another key and cannot be deleted before that job."
        )
    session.delete(file)


def is_unneeded(session: Session, file_id: str) -> bool:
    """Whether no job of anyone trains or evaluates on a file. Until the transaction ends, none can be
    submitted that does."""
    _hold(session, file_id, exclusively=True)
    return session.execute(_needing(file_id), execution_options=OF_EVERYONE).first() is None


def _needing(file_id: str) -> Select[str, str | None]:
    """Jobs of anyone that train or evaluate on a file, and their owners: up to a hundred. (With a condition
    on the owner, SQLite would search all jobs of that owner instead of the file's.)"""
    uses = or_(Job.file_id == file_id, Job.validation_file_id == file_id)
    return select(Job.id, Job.owner).where(uses).limit(100)


def hold(session: Session, file_id: str, field: str) -> None:
    """Keeps a file from being deleted until the transaction ends.

    Raises:
        NotFound: the file has been deleted.
    """
    if not _hold(session, file_id, exclusively=False):
        raise NotFound(f"The file {file_id} has been deleted.", field=field)


def _hold(session: Session, file_id: str, *, exclusively: bool) -> bool:
    """Locks the file's row and returns whether it exists. On SQLite, which has one writer, no lock is
    needed."""
    own = select(File.id).where(File.id == file_id)
    own = own.with_for_update() if exclusively else own.with_for_update(read=True, key_share=True)
    return session.scalar(own) is not None
