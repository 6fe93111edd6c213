"""`python -m workers.exports`: makes the exports that are waiting, one after the other, and ends."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.contract.export import FILES, ExportOrder, ExportResult
from app.contract.regular_files import make_folders, open_regular, read_regular, regular_file_names
from app.errors import ReplacedDatabase, Unavailable
from app.exports import requests
from app.exports.requests import Claimed
from app.logs import configure
from app.models import base_models
from app.settings import Settings, get_settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.disk import remove_tree
from app.storage.ids import new_id
from app.storage.objects import Manifest, object_storage
from workers import background
from workers.exports.protocol import RESULT, ExportTask
from workers.orphaned_processes import children_of, wait_until_gone
from workers.run_directory import TOKEN_VARIABLE
from workers.stop_signals import StopSignals
from workers.trainer_process import WITHOUT_NETWORK, device_environment, pipe_with
from workers.training.processes.lifeline import end_with_supervisor

log = structlog.get_logger("accrue.export")

_RETRY_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_BYTES_PER_PARAMETER = 4
_MOST_SECONDS = 6 * 3600.0
_MOST_RESULT_BYTES = 2**20
_ENDS_WITHIN_SECONDS = 10.0
_NICENESS = 5
"""Of this process and its children: trainers on the same machine have priority."""

_CRASHED = (
    "the process that made the export ended: usually, the machine has too little memory for the model's "
    "weights in fp32"
)


_TOO_SLOW = f"the export took more than {_MOST_SECONDS / 3600:.0f} hours, and was stopped"


def main() -> None:
    """Runs until nothing is waiting, until SIGTERM, or until the supervisor that started it has gone."""
    end_with_supervisor()
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    database = Database(settings.resolved_database_url)
    os.nice(_NICENESS)
    stop, process = StopSignals(), new_id("export")
    try:
        while not stop.received:
            try:
                with database.writing() as session:
                    claimed = requests.claim(session, process)
                if claimed is None:
                    return
                _make(claimed, process, settings, database, lambda: stop.received)
            except OperationalError as error:
                log.warning("the database did not answer", error=str(error.orig))
                time.sleep(_RETRY_SECONDS)
            except ReplacedDatabase as error:
                log.error("nothing can be stored", error=error.message)
                time.sleep(_RETRY_SECONDS)
    finally:
        database.close()


def _make(
    claimed: Claimed, process: str, settings: Settings, database: Database, stopped: Callable[[], bool]
) -> None:
    """Makes one export in a child process, and stores how it ended."""
    log.info("making an export", export=claimed.id, job=claimed.job_id)
    folder = requests.folder_of(settings, claimed.job_id, claimed.id, claimed.attempts)
    if claimed.attempts > requests.MAX_ATTEMPTS:
        result: ExportResult | None = ExportResult(error=_CRASHED)
    else:
        try:
            result = _in_child(claimed, process, folder, settings, database, stopped)
        except Unavailable as error:
            result = ExportResult(error=error.message)
        except OSError as error:
            result = ExportResult(error=f"the export cannot be written: {error.strerror or 'system error'}")
    kept = False
    if result is not None:
        with database.writing() as session:
            kept = requests.finish(session, process, claimed.id, result)
    if kept:  # so no other attempt goes on
        _remove_other_attempts(folder)
    is_stored_elsewhere = settings.object_storage is not None
    if is_stored_elsewhere or not kept or result is None or result.error is not None:
        # each attempt has a folder of its own: another one may go on
        remove_tree(settings.runs_dir, *folder.relative_to(settings.runs_dir).parts)
        with suppress(OSError):
            folder.parent.rmdir()
    if not kept and is_stored_elsewhere:
        with database.reading() as session:
            is_deleted = not requests.exists(session, claimed.id)
        if is_deleted:
            stored_files.remove_export(settings, claimed.job_id, claimed.id)
    if result is None:
        with database.writing() as session:  # if the export still is this process's, which has to stop
            requests.release(session, process, claimed.id)
        return
    log.info("an export ended", export=claimed.id, job=claimed.job_id, error=result.error)


def _in_child(
    claimed: Claimed,
    process: str,
    folder: Path,
    settings: Settings,
    database: Database,
    stopped: Callable[[], bool],
) -> ExportResult | None:
    """Runs the child to its end. Returns None if the export is not wanted any more, or if this process has to
    stop."""
    order = ExportOrder.model_validate(claimed.order)
    finding = background.begin(
        lambda: (
            base_models.path_of(order.model, settings),
            base_models.layer_paths(order.model, settings),
            stored_files.path_of_file(settings, order.data_file).resolve(),
        )
    )
    if not _awaited(finding.done, claimed, process, database, stopped):
        return None
    if not finding.done():
        return ExportResult(error=_TOO_SLOW)
    try:
        path, layer_paths, data_file = finding.result()
    except ValueError as error:
        return ExportResult(error=str(error))
    parts = folder.relative_to(settings.runs_dir).parts
    remove_tree(settings.runs_dir, *parts)
    make_folders(settings.runs_dir, *parts)
    needed = order.model.architecture.parameters * _BYTES_PER_PARAMETER
    if shutil.disk_usage(folder).free < needed:
        return ExportResult(
            error=f"the disk has no space for the export, which may take {needed / 2**30:.1f} GiB: free some"
        )
    with _temporary_folder(folder) as temporary:
        task = ExportTask(
            order=order,
            path=path,
            layer_paths=layer_paths,
            data=str(data_file),
            folder=str(folder.resolve()),
            temporary=temporary,
            hidden=str(settings.data_dir.resolve()) if settings.trainer_isolation else None,
            converter=settings.gguf_converter,
        )
        child = _started(task, settings)
        try:
            if not _awaited(lambda: child.poll() is not None, claimed, process, database, stopped):
                return None
            if child.poll() is None:
                return ExportResult(error=_TOO_SLOW)
            result = _result(Path(temporary)) or ExportResult(error=_CRASHED)
            if result.error is None:
                storing = background.begin(lambda: _store(claimed, folder, settings))
                if not _awaited(storing.done, claimed, process, database, stopped):
                    return None
                if not storing.done():
                    return ExportResult(error=_TOO_SLOW)
                storing.result()
            return result
        finally:
            inner = children_of(child.pid)
            child.kill()
            child.wait()
            wait_until_gone(inner, _ENDS_WITHIN_SECONDS)


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[str]:
    """A temporary folder that is deleted at the end, whatever a child has left in it."""
    temporary = tempfile.mkdtemp(prefix="temporary-", dir=folder)
    try:
        yield temporary
    finally:
        remove_tree(Path(temporary))


def _store(claimed: Claimed, folder: Path, settings: Settings) -> None:
    """Puts an export's files into object storage, if there is one.

    Raises:
        Unavailable: the storage cannot be used.
        OSError: a file cannot be read.
    """
    storage = object_storage(settings)
    if storage is None:
        return
    stored = stored_files.stored_export(storage, claimed.job_id, claimed.id)
    files = {}
    for name in regular_file_names(folder, FILES):
        with open_regular(folder, FILES, name) as file:
            files[f"{FILES}/{name}"] = stored.store(claimed.attempts, 1, f"{FILES}/{name}", file)
    manifest = Manifest(attempt=claimed.attempts, number=1, files=files)
    stored.publish(manifest)
    stored.delete_before(manifest)


def _remove_other_attempts(folder: Path) -> None:
    """Removes what earlier attempts, which were killed, have left."""
    others = [each for each in folder.parent.iterdir() if each != folder] if folder.parent.is_dir() else []
    for other in others:
        remove_tree(other)


def _started(task: ExportTask, settings: Settings) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.exports.export_main"]
    token = pipe_with(os.environ.get("HF_TOKEN", ""))
    try:
        child = subprocess.Popen(
            command if settings.trainer_network else [*WITHOUT_NETWORK, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**device_environment([]), TOKEN_VARIABLE: str(token)},
            pass_fds=[token],
            start_new_session=True,
            cwd=PACKAGES_FOLDER,
        )
    finally:
        os.close(token)
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(task.model_dump_json().encode())
    return child


def _awaited(
    is_done: Callable[[], bool],
    claimed: Claimed,
    process: str,
    database: Database,
    stopped: Callable[[], bool],
) -> bool:
    """Waits until something is done, at most `_MOST_SECONDS`, and renews the claim. Returns False if the
    export is not wanted any more, or if this process has to stop."""
    until = time.monotonic() + _MOST_SECONDS
    renewed = time.monotonic()
    while not is_done() and time.monotonic() < until:
        if stopped():
            return False
        if time.monotonic() - renewed >= requests.RENEWAL_SECONDS:
            with database.writing() as session:
                if not requests.renew(session, process, claimed.id):
                    return False
            renewed = time.monotonic()
        time.sleep(_LOOK_SECONDS)
    return True


def _result(folder: Path) -> ExportResult | None:
    """What the child has reported; None if it has not."""
    try:
        content = read_regular(folder, RESULT, max_bytes=_MOST_RESULT_BYTES)
        return None if content is None else ExportResult.model_validate_json(content)
    except (OSError, ValidationError):
        return None


if __name__ == "__main__":
    main()
