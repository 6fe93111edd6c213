"""Backups of a service on SQLite, taken while it runs: the database as it stands, and the files it names.

A backup is a folder with `accrue.db` (written by SQLite's online backup), `files/` and, on request, `runs/`
with complete checkpoints and models. Stored files never change, so files copied after the database still
match it.
"""

import contextlib
import errno
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from app.contract import regular_files
from app.contract.regular_files import NotRegular, open_regular
from app.errors import InvalidRequest
from app.settings import Settings
from app.storage.database import Database
from app.storage.migrations import migrate
from app.storage.session import Session
from app.storage.tables import Job

_DATABASE = "accrue.db"
_LOST = "lost-files.txt"
"""Lists the files that the data folder lacked when the backup was taken."""
_DATABASE_COPIES = 4
"""How many times the database is copied before giving up, if files are being deleted meanwhile."""
_BESIDE = ("-wal", "-shm", "-journal")
"""Ends of the names of the files that SQLite keeps beside a database."""
_FILE_ID = re.compile(r"file-[A-Za-z0-9]+")


@dataclass(frozen=True)
class BackupSummary:
    """What a backup holds."""

    folder: Path
    jobs: int
    files: int
    bytes: int
    lost: tuple[str, ...] = ()
    """Files whose contents the data folder lacked already."""


def take(settings: Settings, folder: Path, *, runs: bool) -> BackupSummary:
    """Writes a backup; the folder appears only when it is complete.

    Raises:
        InvalidRequest: the database is not an SQLite file, it does not exist, or the folder already exists.
    """
    source = _sqlite_file(settings)
    if not source.exists():
        raise InvalidRequest(f"{source} does not exist: there is nothing to back up")
    if folder.exists():
        raise InvalidRequest(f"{folder} already exists: choose another name")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    try:
        (partial / "files").mkdir(mode=0o700)
        lost = _copy_database_and_files(source, settings.files_dir, partial)
        database = Database(_url_of(partial / _DATABASE))
        with database.reading() as session:
            jobs = _jobs(session)
        database.close()
        if runs:
            for job_id in jobs:
                links = settings.copies_dir / "outgoing" / f"backup-{os.getpid()}-{job_id}"
                _copy_run(settings.runs_dir / job_id, partial / "runs" / job_id, links)
        for leftover in partial.glob(f"{_DATABASE}-*"):
            leftover.unlink()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files = sum(1 for _ in (folder / "files").iterdir())
    return BackupSummary(folder, len(jobs), files, _size(folder), lost)


def _copy_database_and_files(source: Path, files_dir: Path, target: Path) -> tuple[str, ...]:
    """Copies the database and the files that it names. If a file is deleted meanwhile, the database is copied
    again, so that it does not name the file any more.

    Returns:
        The files whose contents are lost: they are named, but do not exist. `_LOST` lists them, too.
    """
    copies, lost = target / "files", []
    for _ in range(_DATABASE_COPIES):
        _copy_database(source, target / _DATABASE)
        named = _named_files(target / _DATABASE)
        for unnamed in [each for each in copies.iterdir() if each.name not in named]:
            unnamed.unlink()
        new = {file_id: digest for file_id, digest in named.items() if not (copies / file_id).exists()}
        _copy_files(new, files_dir, copies)
        lost = [file_id for file_id in new if not (copies / file_id).exists()]
        if not lost:
            return ()
    (target / _LOST).write_text("".join(f"{file_id}\n" for file_id in lost))
    return tuple(lost)


def restore(settings: Settings, folder: Path) -> BackupSummary:
    """Puts a backup where the service looks for its data.

    Jobs that were running when the backup was taken resume from their last checkpoint if the backup includes
    `runs/`, and start again otherwise.

    Raises:
        InvalidRequest: the backup is incomplete or damaged, or a database already exists; nothing was
        written.
    """
    target = _sqlite_file(settings)
    if not (folder / _DATABASE).is_file():
        raise InvalidRequest(f"{folder} is not a backup: it contains no {_DATABASE}")
    for left in (target, *(target.with_name(f"{target.name}{suffix}") for suffix in _BESIDE)):
        if left.exists():  # SQLite would apply the log of another database to the restored one
            raise InvalidRequest(
                f"{left} exists already: stop the service and the workers, and move {target.name} away with "
                "its -wal and -shm files"
            )
    wrong = _what_is_wrong(folder / _DATABASE)
    if wrong is not None:
        raise InvalidRequest(f"{folder / _DATABASE} is damaged: {wrong}")
    named = _named_files(folder / _DATABASE)
    if strange := [file_id for file_id in named if not _FILE_ID.fullmatch(file_id)]:
        raise InvalidRequest(
            f"the backup refers to a file by a name that the service never creates: {strange[0][:80]!r}"
        )
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise InvalidRequest(f"the backup contains a symbolic link, which accrue backup never writes: {link}")
    lost = _lost_before(folder)
    missing = [file_id for file_id in named if not (folder / "files" / file_id).is_file()]
    if missing := [file_id for file_id in missing if file_id not in lost]:
        raise InvalidRequest(f"the backup lacks files that its jobs need: {', '.join(missing[:5])}")
    if special := next((path for path in folder.rglob("*") if not (path.is_file() or path.is_dir())), None):
        raise InvalidRequest(f"the backup contains something that is neither a file nor a folder: {special}")
    own_runs = (settings.runs_dir / run.name for run in (folder / "runs").glob("*"))
    if own := next((run for run in own_runs if run.exists()), None):
        raise InvalidRequest(  # a mixture of an older run and a newer one would be of no use
            f"{own} exists already, and may be newer than the backup: move {settings.runs_dir} away"
        )
    settings.make_directories()
    with _migrated_copy(folder / _DATABASE, target) as (partial, jobs):
        files = _copy_files(named, folder / "files", settings.files_dir)
        _restore_runs(folder / "runs", settings.runs_dir)
        partial.rename(target)
    return BackupSummary(folder, len(jobs), files, _size(folder), tuple(sorted(lost)))


def _restore_runs(source: Path, target: Path) -> None:
    """Copies the run directories of a backup: all of them, or none."""
    begun: list[Path] = []
    try:
        for run in source.glob("*"):
            begun.append(target / run.name)
            shutil.copytree(run, begun[-1], symlinks=True)
    except BaseException:
        for each in begun:
            shutil.rmtree(each, ignore_errors=True)
        raise


def _lost_before(folder: Path) -> set[str]:
    """The files that were lost before a backup was taken."""
    with contextlib.suppress(FileNotFoundError):
        return set((folder / _LOST).read_text().split())
    return set()


@contextlib.contextmanager
def _migrated_copy(source: Path, target: Path) -> Iterator[tuple[Path, list[str]]]:
    """A copy of a database beside its target, at the newest revision, and the ids of its jobs; the copy is
    removed unless the block moves it.

    Raises:
        InvalidRequest: a newer version wrote it, or it is not a database of this program.
    """
    from alembic.util import CommandError

    partial = target.with_name(f".{target.name}.{os.getpid()}")
    url = _url_of(partial)
    try:
        try:
            _copy_database(source, partial)
            migrate(url)
            database = Database(url)
            with database.reading() as session:
                jobs = _jobs(session)
            database.close()
        except (CommandError, SQLAlchemyError) as error:
            raise InvalidRequest(
                f"the backup's database cannot be brought to the newest version "
                f"({str(error).splitlines()[0][:200]}): was it written by a newer version of Accrue?"
            ) from None
        for name in (f"{partial.name}-wal", f"{partial.name}-shm"):
            partial.with_name(name).unlink(missing_ok=True)  # closing it has written them back
        yield partial, jobs
    finally:
        for path in target.parent.glob(f"{partial.name}*"):
            path.unlink(missing_ok=True)


def _sqlite_file(settings: Settings) -> Path:
    url = make_url(settings.resolved_database_url)
    if url.get_backend_name() != "sqlite" or not url.database:
        raise InvalidRequest(
            "ACCRUE_DATABASE_URL names a server: back it up with its own tools (pg_dump), and copy the data "
            "folder's files/ and runs/ afterwards"
        )
    return Path(url.database)


def _url_of(path: Path) -> str:
    """SQLAlchemy's URL of an SQLite file."""
    return URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)


def _opened(path: Path) -> sqlite3.Connection:
    """An SQLite file, opened for reading."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _named_files(path: Path) -> dict[str, str]:
    """The ids of the files that a database refers to, with the SHA-256 of their contents."""
    with contextlib.closing(_opened(path)) as database:
        return dict(database.execute("SELECT id, sha256 FROM files"))


def _what_is_wrong(path: Path) -> str | None:
    """The first problem that SQLite's integrity check finds, or None."""
    try:
        with contextlib.closing(_opened(path)) as database:
            (answer,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            database.execute("SELECT id, sha256 FROM files LIMIT 1")
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if answer == "ok" else str(answer)


def _copy_database(source: Path, target: Path) -> None:
    """Copies the database as of one moment (in WAL mode, no writer waits) and flushes it to disk."""
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


def _copy_files(named: Mapping[str, str], source: Path, target: Path) -> int:
    """Copies the files that still exist, but each content only once. Returns the number of files."""
    copied = 0
    first: dict[str, Path] = {}
    for file_id, sha256 in named.items():
        own = target / file_id
        own.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the file and its row have been deleted since
            try:
                own.hardlink_to(first[sha256])
            except (
                KeyError,
                OSError,
            ):  # the first file with this content, or a file system without hard links
                shutil.copy2(source / file_id, own, follow_symlinks=False)
                first[sha256] = own
            copied += 1
    return copied


def _size(folder: Path) -> int:
    """The total size of its files in bytes; a file with several hard links counts once."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_size for each in files}.values())


def _jobs(session: Session) -> list[str]:
    return list(session.scalars(select(Job.id)))


_BLOCK = 2**20
_MAX_DEPTH = 16
"""The maximum depth of folders that is copied from a run directory; trainers create four levels."""


_CHECKPOINTS, _REPLICAS = "checkpoints", "replica-*"
_LISTINGS = 20
"""How many times checkpoints are listed before giving up, if they are being replaced meanwhile."""
_NO_LINKS = (
    errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EROFS,
)  # fmt: skip
"""Why a file cannot be linked."""


def _copy_run(source: Path, target: Path, links: Path) -> None:
    """Copies a job's run directory without unfinished files, while a trainer may change it.

    Copying a checkpoint may take longer than the trainer keeps it. So checkpoints are linked first, and their
    links are copied; the logs are copied last, so that they reach at least to the newest checkpoint.

    Args:
        links: a new folder for the links, on the same file system as the run directory if possible.
    """
    try:
        without = _CHECKPOINTS if _link_checkpoints(source, links) else None
        _copy_tree(links, target)
        _copy_tree(source, target, without)
    finally:
        shutil.rmtree(links, ignore_errors=True)


def _link_checkpoints(source: Path, links: Path) -> bool:
    """Links the checkpoints of a run directory and of its replicas. Returns False, and leaves nothing, if
    files cannot be linked."""
    try:
        for base in (source, *source.glob(_REPLICAS)):
            for _ in range(_LISTINGS):
                # In this order, the mark of the best checkpoint comes last.
                names = sorted(_names(base, _CHECKPOINTS), reverse=True)
                linked = [_link_checkpoint(base, links / base.relative_to(source), name) for name in names]
                if all(linked):
                    break
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.rmtree(links, ignore_errors=True)
        return False
    return True


def _names(run: Path, *parts: str) -> list[str]:
    """The names of the finished files and folders in a folder of a run directory."""
    with (
        suppress(FileNotFoundError, NotRegular),
        regular_files.folder(run.parent, run.name, *parts) as within,
        os.scandir(within) as entries,
    ):
        return [each.name for each in entries if not each.name.startswith(".")]
    return []


def _link_checkpoint(run: Path, links: Path, name: str) -> bool:
    """Links all files of a checkpoint, or a file beside the checkpoints, unless it is linked already. Returns
    False, and leaves nothing, if it is deleted meanwhile. What is neither a file nor a folder is left out."""
    own = links / _CHECKPOINTS / name
    if own.exists():
        return True
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with regular_files.folder(run.parent, run.name, _CHECKPOINTS) as within:
            mode = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                os.link(name, own, src_dir_fd=within, follow_symlinks=False)
            if not stat.S_ISDIR(mode):
                return True
        own.mkdir(mode=0o700)
        for folder, files in _walk(run, _CHECKPOINTS, name):
            links.joinpath(*folder).mkdir(mode=0o700, exist_ok=True)
            with regular_files.folder(run.parent, run.name, *folder) as within:
                for file in files:
                    os.link(file, links.joinpath(*folder, file), src_dir_fd=within, follow_symlinks=False)
        (run / _CHECKPOINTS / name).lstat()  # it was there to the end
    except (FileNotFoundError, NotRegular):
        shutil.rmtree(own, ignore_errors=True)
        return False
    return True


def _copy_tree(source: Path, target: Path, without: str | None = None) -> None:
    """Copies the files of a run directory that a trainer may change meanwhile.

    Args:
        without: the name of folders that are left out.
    """
    for folder, files in _walk(source):
        if without in folder:
            continue
        target.joinpath(*folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            _copy_plain(source, target, *folder, file)


def _walk(root: Path, *start: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The folders below a folder of a run directory, each with the names of its files, without unfinished
    ones. Folders are opened without following links."""
    waiting = [start]
    while waiting:
        parts = waiting.pop()
        try:
            with (
                regular_files.folder(root.parent, root.name, *parts) as within,
                os.scandir(within) as entries,
            ):
                found = [each for each in entries if not each.name.startswith(".") and each.name != "lock"]
                folders = [each.name for each in found if _is(each.is_dir) and len(parts) < _MAX_DEPTH]
                files = [each.name for each in found if _is(each.is_file)]
        except (FileNotFoundError, NotRegular):  # a checkpoint that was retired meanwhile
            continue
        waiting += [(*parts, name) for name in folders]
        yield parts, files


def _is(kind: Callable[..., bool]) -> bool:
    try:
        return kind(follow_symlinks=False)
    except OSError:  # it is gone
        return False


def _copy_plain(source: Path, target: Path, *parts: str) -> None:
    """Copies a file; holes stay holes, so that the copy takes no more space than the file."""
    try:
        old = open_regular(source.parent, source.name, *parts)
    except (FileNotFoundError, NotRegular):
        return
    with old, target.joinpath(*parts).open("xb") as new:
        state = os.fstat(old.fileno())
        for start, end in _data_ranges(old.fileno(), state.st_size):  # a trainer may go on writing
            old.seek(start)
            new.seek(start)
            while start < end and (block := old.read(min(end - start, _BLOCK))):
                new.write(block)
                start += len(block)
        new.truncate(state.st_size)
    os.utime(target.joinpath(*parts), ns=(state.st_atime_ns, state.st_mtime_ns))


def _data_ranges(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of an open file that hold data; the whole file if the system cannot tell."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
            end = min(os.lseek(file, start, os.SEEK_HOLE), size)
        except (OSError, AttributeError) as error:
            if getattr(error, "errno", None) == errno.ENXIO:  # only a hole is left
                return
            start, end = at, size
        yield start, end
        at = end
