"""Files that other machines may have stored: where this machine finds them, fetched first if need be.

Without ACCRUE_OBJECT_STORAGE, all of them are in the data folder. With it, a run directory of this machine is
used only if no later attempt of the job, on another machine, has stored its own; otherwise a copy is made in
the folder `copies`, which may be deleted at any time.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from app.contract import regular_files
from app.contract.regular_files import read_regular
from app.errors import Unavailable
from app.settings import Settings
from app.storage.disk import remove_tree
from app.storage.objects import Manifest, ObjectStorage, StoredFolder, object_storage

_MOST_CHECKPOINTS = 100
"""The most checkpoints of a job that are listed; a trainer keeps a handful."""

_CONTENT = "content"
"""The name of a file's content, in its folder in object storage."""


class LinkedFolder(ValueError):
    """A folder that a job should have made is a link."""


def stored_run(storage: ObjectStorage, job_id: str) -> StoredFolder:
    """A job's run directory in object storage."""
    return StoredFolder(storage, f"runs/{job_id}")


def stored_export(storage: ObjectStorage, job_id: str, export_id: str) -> StoredFolder:
    """An export's files in object storage."""
    return StoredFolder(storage, f"exports/{job_id}/{export_id}")


def _stored_file(storage: ObjectStorage, file_id: str) -> StoredFolder:
    return StoredFolder(storage, f"files/{file_id}")


def store_file(settings: Settings, path: Path) -> None:
    """Puts a new training file, whose name is its id, into object storage, if there is one.

    Raises:
        Unavailable: the storage cannot be used.
    """
    storage = object_storage(settings)
    if storage is None:
        return
    folder = _stored_file(storage, path.name)
    with path.open("rb") as content:
        stored = folder.store(0, 1, _CONTENT, content)
    folder.publish(Manifest(attempt=0, number=1, files={_CONTENT: stored}))


def remove_file(settings: Settings, file_id: str) -> bool:
    """Deletes a training file here and from object storage. Returns whether it is completely gone."""
    (settings.files_dir / file_id).unlink(missing_ok=True)
    remove_tree(settings.copies_dir / "files", file_id)
    return _delete_stored(settings, f"files/{file_id}")


def remove_run(settings: Settings, job_id: str) -> bool:
    """Deletes the run directory of a deleted job with its exports, from this machine and from object storage,
    and its launches in engines. Returns whether they are completely gone. Other machines' own run directories
    are deleted by their workers (workers/disk_cleaner.py)."""
    for folder in (settings.launches_dir, settings.copies_dir / "runs", settings.copies_dir / "exports"):
        remove_tree(folder, job_id)
    is_gone = remove_tree(settings.runs_dir, job_id)
    return _delete_stored(settings, f"runs/{job_id}", f"exports/{job_id}") and is_gone


def remove_stored_models(settings: Settings, job_id: str) -> None:
    """Deletes a job's model, its replicas' models and its exports from object storage, if there is one. What
    cannot be deleted now is deleted with the job."""
    for kind in ("runs", "exports"):
        remove_tree(settings.copies_dir / kind, job_id)
    with suppress(Unavailable):
        storage = object_storage(settings)
        if storage is None:
            return
        storage.delete_folder(f"exports/{job_id}")
        stored = stored_run(storage, job_id)
        newest = stored.newest()
        if newest is not None:
            kept = {path: file for path, file in newest.files.items() if "model" not in path.split("/")[:2]}
            stored.publish(manifest := newest.model_copy(update={"number": newest.number + 1, "files": kept}))
            stored.delete_before(manifest)


def remove_export(settings: Settings, job_id: str, export_id: str) -> bool:
    """Deletes an export's files here and from object storage. Returns whether they are completely gone."""
    remove_tree(settings.copies_dir / "exports", job_id, export_id)
    is_gone = remove_tree(settings.runs_dir, job_id, "exports", export_id)
    return _delete_stored(settings, f"exports/{job_id}/{export_id}") and is_gone


def _delete_stored(settings: Settings, *prefixes: str) -> bool:
    """Deletes folders from object storage, if there is one. Returns whether that was possible."""
    try:
        if (storage := object_storage(settings)) is not None:
            for prefix in prefixes:
                storage.delete_folder(prefix)
    except Unavailable:
        return False
    return True


def path_of_file(settings: Settings, file_id: str) -> Path:
    """Where a training file is on this machine. Its path may lead to nothing, if it was deleted.

    Raises:
        Unavailable: the object storage cannot be used, or has damaged the file.
    """
    own = settings.files_dir / file_id
    storage = object_storage(settings)
    if storage is None or own.exists():
        return own
    copy = settings.copies_dir / "files" / file_id
    _fetch(_stored_file(storage, file_id), copy)
    return copy / _CONTENT


def path_of_run(settings: Settings, job_id: str, *within: str) -> Path:
    """The folder in which a part of a job's run directory is to be read on this machine.

    Args:
        within: the part, name by name: a file, or a folder with all that is in it.

    Raises:
        Damaged, Unavailable: the object storage has damaged the files, or cannot be used.
    """
    own = settings.runs_dir / job_id
    newer = _newer_elsewhere(settings, job_id)
    if newer is None:
        return own
    stored, newest = newer
    copy = settings.copies_dir / "runs" / job_id / "-".join(within)  # each part has its own lock
    _fetch(stored, copy, "/".join(within), newest)
    return copy


def folder_of_run(settings: Settings, job_id: str, *within: str) -> Path:
    """A folder in a job's run directory, on this machine; only the data folder's own path may have links.

    Raises:
        LinkedFolder: the folder or one above it is a link, which a trainer may have left.
        Damaged, Unavailable: as in `path_of_run`.
    """
    root = path_of_run(settings, job_id, *within)
    try:
        with regular_files.folder(root.parent, root.name, *within):
            pass
    except regular_files.NotRegular:
        raise LinkedFolder(f"the folder {'/'.join(within)} of the job {job_id} is a link") from None
    except OSError:  # such as a missing folder: reading from it fails with the reason
        pass
    return root.parent.resolve().joinpath(root.name, *within)


def path_of_export(settings: Settings, job_id: str, export_id: str, attempt: int) -> Path:
    """The folder of an export's attempt on this machine.

    Raises:
        Damaged, Unavailable: the object storage has damaged the files, or cannot be used.
    """
    own = settings.runs_dir / job_id / "exports" / export_id / str(attempt)
    storage = object_storage(settings)
    if storage is None or own.exists():
        return own
    copy = settings.copies_dir / "exports" / job_id / export_id
    _fetch(stored_export(storage, job_id, export_id), copy)
    return copy


def remove_unused(settings: Settings, seconds: float) -> list[Path]:
    """Deletes the copies that have been unused for this long, and what interrupted work
    has left. Returns them."""
    before, removed = time.time() - seconds, []
    for kind in ("incoming/*", "outgoing/*"):
        for path in settings.copies_dir.glob(kind):
            if path.stat().st_mtime < before and remove_tree(path):
                removed.append(path)
    for kind in ("files/*.lock", "runs/*/*.lock", "exports/*/*.lock"):
        for path in settings.copies_dir.glob(kind):
            with suppress(FileNotFoundError, BlockingIOError), path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_mtime < before and remove_tree(
                    path.with_name(path.name.removesuffix(".lock"))
                ):
                    removed.append(path.with_name(path.name.removesuffix(".lock")))
                    path.unlink()
    return removed


def checkpoint_names(settings: Settings, job_id: str) -> set[str]:
    """The names of a job's checkpoints that can be read or fetched.

    Raises:
        Unavailable: the object storage cannot be used.
    """
    newer = _newer_elsewhere(settings, job_id)
    if newer is None:
        with (
            suppress(OSError),
            regular_files.folder(settings.runs_dir, job_id, "checkpoints") as opened,
            os.scandir(opened) as entries,
        ):
            names = (entry.name for entry in entries if entry.name.startswith("step-"))
            return set(islice(names, _MOST_CHECKPOINTS))
        return set()
    split = (path.split("/") for path in newer[1].files)
    return {parts[1] for parts in split if parts[0] == "checkpoints" and parts[1].startswith("step-")}


def attempt_of_run(folder: Path) -> int:
    """The attempt whose trainer worked last in a run directory; 0 if none has."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return int(json.loads(read_regular(folder, "spec.json") or b"{}")["attempt"])
    return 0


def _newer_elsewhere(settings: Settings, job_id: str) -> tuple[StoredFolder, Manifest] | None:
    """The job's run directory in object storage, with its newest version; None if this machine's own run
    directory is of the same attempt or a later one."""
    storage = object_storage(settings)
    if storage is None:
        return None
    stored = stored_run(storage, job_id)
    newest = stored.newest()
    if newest is None or newest.attempt <= attempt_of_run(settings.runs_dir / job_id):
        return None
    return stored, newest


def _fetch(stored: StoredFolder, copy: Path, part: str = "", newest: Manifest | None = None) -> None:
    """Makes a copy contain what is stored now, or a part of it."""
    with _locked(copy):
        stored.fetch(copy, lambda path: not part or path == part or path.startswith(f"{part}/"), newest)


@contextmanager
def _locked(copy: Path) -> Iterator[None]:
    """Lets one thread of one process at a time change a copy."""
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with copy.with_name(f"{copy.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.name)  # shows when it was last used
        yield
