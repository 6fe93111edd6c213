"""Backups of a service on SQLite, taken while it runs: the database as it stands, and the files it names.

A backup is a folder: `accrue.db`, made by SQLite's online backup, `files/`, and, where asked for, `runs/`
with whole checkpoints and models. Files never change once they are stored, so copying them afterwards is
copying what the database means.
"""

import contextlib
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url, select
from sqlalchemy.orm import Session

from app.database import Database
from app.errors import InvalidRequest
from app.migrations import migrate
from app.models import File, Job
from app.settings import Settings

_DATABASE = "accrue.db"


@dataclass(frozen=True)
class Taken:
    """What a backup holds."""

    folder: Path
    jobs: int
    files: int
    bytes: int


def take(settings: Settings, folder: Path, *, runs: bool) -> Taken:
    """Writes a backup; the folder appears once it is whole.

    Raises:
        InvalidRequest: the database is no SQLite file, or the folder is there already.
    """
    source = _sqlite_file(settings)
    if not source.exists():
        raise InvalidRequest(f"{source} is not there: nothing to back up")
    if folder.exists():
        raise InvalidRequest(f"{folder} is there already: choose another name")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    try:
        _copy_database(source, partial / _DATABASE)
        database = Database(f"sqlite:///{(partial / _DATABASE).absolute()}")
        with database.reading() as session:
            files, jobs = _copy_files(session, settings, partial), _jobs(session)
        database.close()
        if runs:
            for job_id in jobs:
                _copy_run(settings.runs_dir / job_id, partial / "runs" / job_id)
        for leftover in partial.glob(f"{_DATABASE}-*"):
            leftover.unlink()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Taken(folder, len(jobs), files, size)


def restore(settings: Settings, folder: Path) -> Taken:
    """Puts a backup where the service looks for its data.

    What ran when it was taken goes on from its last checkpoint, if runs are in it, else from its beginning.

    Raises:
        InvalidRequest: it is no whole backup, or there is a database already; nothing was written.
    """
    target = _sqlite_file(settings)
    if not (folder / _DATABASE).is_file():
        raise InvalidRequest(f"{folder} is no backup: there is no {_DATABASE} in it")
    if target.exists():
        raise InvalidRequest(
            f"{target} is there already: stop service and workers, and move it away with its -wal and -shm"
        )
    wrong = _what_is_wrong(folder / _DATABASE)
    if wrong is not None:
        raise InvalidRequest(f"{folder / _DATABASE} is damaged: {wrong}")
    missing = [file for file in _named_files(folder / _DATABASE) if not (folder / "files" / file).exists()]
    if missing:
        raise InvalidRequest(f"the backup lacks files that its jobs need: {', '.join(missing[:5])}")
    settings.make_directories()
    for part, own in (("files", settings.files_dir), ("runs", settings.runs_dir)):
        if (folder / part).is_dir():
            shutil.copytree(folder / part, own, dirs_exist_ok=True)
    _copy_database(folder / _DATABASE, target)
    migrate(settings.url)
    database = Database(settings.url)
    with database.reading() as session:
        jobs, files = _jobs(session), session.scalars(select(File.id)).all()
    database.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Taken(folder, len(jobs), len(files), size)


def _sqlite_file(settings: Settings) -> Path:
    url = make_url(settings.url)
    if url.get_backend_name() != "sqlite" or not url.database:
        raise InvalidRequest(
            "ACCRUE_DATABASE_URL names a server: back it up with its own tools (pg_dump), and copy the data "
            "folder's files/ and runs/ afterwards"
        )
    return Path(url.database)


def _named_files(path: Path) -> list[str]:
    """The ids of the files that a database names."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return [file_id for (file_id,) in database.execute("SELECT id FROM files")]


def _what_is_wrong(path: Path) -> str | None:
    """The first thing that SQLite finds wrong with a database; null: nothing."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            (answer,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if answer == "ok" else str(answer)


def _copy_database(source: Path, target: Path) -> None:
    """In one go, as of one moment: in WAL mode nobody who writes has to wait. On the disk when it returns."""
    with (
        contextlib.closing(sqlite3.connect(source, timeout=30)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")
    target.chmod(0o600)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _copy_files(session: Session, settings: Settings, folder: Path) -> int:
    """The files that the copied database names; one that was deleted meanwhile is named no more by now."""
    (folder / "files").mkdir(mode=0o700)
    copied = 0
    for file_id in session.scalars(select(File.id)):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(settings.files_dir / file_id, folder / "files" / file_id)
            copied += 1
    return copied


def _jobs(session: Session) -> list[str]:
    return list(session.scalars(select(Job.id)))


def _copy_run(source: Path, target: Path) -> None:
    """What a job's run directory holds, without what is only begun."""
    if not source.is_dir():
        return

    def begun(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") or name == "lock"]

    with contextlib.suppress(shutil.Error):  # a checkpoint that was retired meanwhile
        shutil.copytree(source, target, ignore=begun)
