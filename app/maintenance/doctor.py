"""`accrue doctor`: checks this installation, and says how to fix each problem."""

import os
import re
import secrets
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import httpx2 as httpx
from sqlalchemy import func, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from app.contract.architecture import BUILT_IN_MODEL
from app.devices import gpus
from app.errors import BadSetting, Unavailable
from app.maintenance.ineffective_settings import ineffective_settings
from app.models import base_models
from app.planning.devices import GIB
from app.security.oidc import provider_of
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.migrations import current_revision, newest_revision
from app.storage.objects import object_storage
from app.storage.tables import Job, ProfileRequest, Worker

Verdict = Literal["ok", "warning", "error"]

_LOW_DISK_BYTES, _FULL_DISK_BYTES = 5 * GIB, GIB // 10
_SILENT_SECONDS = 30.0

_WAL_RESET_FIXED = (3, 51, 3)
_WAL_RESET_BACKPORTS = {(3, 44): 6, (3, 50): 7}
"""The releases of older lines that have the fix too (sqlite.org/wal.html, "The WAL-Reset Bug")."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    verdict: Verdict
    message: str
    """What the check found and, unless the verdict is ok, what to do about it."""


def examine(settings: Settings) -> Iterator[Finding]:
    """Looks at everything that a service and its workers need, leaving nothing behind."""
    yield _data_folder(settings)
    if settings.object_storage:
        yield _object_storage(settings)
    yield _disk_space(settings)
    if settings.resolved_database_url.startswith("sqlite"):
        yield _sqlite_version(sqlite3.sqlite_version_info)
    if (
        settings.resolved_database_url.startswith("sqlite")
        and not Path(make_url(settings.resolved_database_url).database or "").exists()
    ):
        yield Finding("database", "warning", "does not exist yet: accrue up creates it")
    else:
        yield from _database_checks(settings)
    for message in ineffective_settings():
        yield Finding("settings", "warning", message)
    yield _gpus()
    yield _torch()
    yield _models(settings)
    if settings.executor not in ("local", "process"):
        yield _engine(settings)
    if settings.oidc_issuer is not None:
        yield _sign_in(settings)


_ENGINE_COMMANDS = {
    "slurm": ["sinfo", "--noheader", "--format=%P %D %T"],
    "kubernetes": ["kubectl", "version", "--request-timeout=5s"],
}


def _engine(settings: Settings) -> Finding:
    """Whether the engine in which the worker's trainers run can be reached."""
    name = settings.executor
    try:
        if name == "ray":
            httpx.get(f"{settings.ray_address.rstrip('/')}/api/version", timeout=5).raise_for_status()
        else:
            command = _ENGINE_COMMANDS[name]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except subprocess.CalledProcessError as error:
        why = next(iter(error.stderr.strip().splitlines()), f"status {error.returncode}")
    except (OSError, subprocess.TimeoutExpired, httpx.HTTPError) as error:
        why = str(error)
    else:
        devices = len(settings.executor_devices.split(",")) if settings.executor_devices else 0
        return Finding("engine", "ok", f"{name} answers; {devices or settings.cpu_devices} devices")
    return Finding("engine", "error", f"{name} cannot be used: {why} (docs/engines.md)")


def _sign_in(settings: Settings) -> Finding:
    try:
        provider = provider_of(settings)
        keys = {} if provider is None else provider.published_keys()
    except (BadSetting, Unavailable) as error:
        return Finding("sign-in", "error", f"{error.message} Check ACCRUE_OIDC_ISSUER.")
    return Finding("sign-in", "ok", f"the keys of {settings.oidc_issuer} can be read ({len(keys)})")


def _database_checks(settings: Settings) -> Iterator[Finding]:
    database = Database(settings.resolved_database_url, timeout_seconds=5)
    try:
        yield from _database(database)
    except SQLAlchemyError as error:
        message = f"{str(error).splitlines()[0]}: is ACCRUE_DATABASE_URL right, and the server up?"
        yield Finding("database", "error", message)
    finally:
        database.close()


def _data_folder(settings: Settings) -> Finding:
    folder = settings.data_dir.absolute()
    if not folder.is_dir():
        return Finding("data folder", "warning", f"{folder} does not exist yet: accrue up creates it")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("data folder", "error", f"{folder} cannot be written to ({error.strerror}): "
                       "check its owner, or set ACCRUE_DATA_DIR")  # fmt: skip
    if folder.stat().st_mode & 0o077:
        return Finding("data folder", "warning", f"other users can read {folder}: run chmod 700 {folder}")
    return Finding("data folder", "ok", str(folder))


def _object_storage(settings: Settings) -> Finding:
    """Whether this process can write to, read from and delete from the object storage."""
    key = f"checks/{secrets.token_hex(8)}"
    try:
        storage = object_storage(settings)
        assert storage is not None
        storage.write(key, b"accrue doctor")
        is_equal = storage.read(key) == b"accrue doctor" and key.rpartition("/")[2] in storage.names("checks")
        storage.delete(key)
    except (Unavailable, OSError) as error:
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {cause}".splitlines()[0][:300]
        message = f"it cannot be used ({why}): check ACCRUE_OBJECT_STORAGE and the credentials"
        return Finding("object storage", "error", message)
    if not is_equal:
        return Finding("object storage", "error", "it does not return what was written to it")
    return Finding("object storage", "ok", f"{settings.object_storage} can be written and read")


def _disk_space(settings: Settings) -> Finding:
    folder = settings.data_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    message = f"{free / GIB:.1f} GiB free"
    if free < _FULL_DISK_BYTES:
        why = "so uploads, submissions and checkpoints fail or soon will"
        return Finding("disk", "error", f"{message}, {why}: delete ended jobs, or set ACCRUE_DATA_DIR")
    if free < _LOW_DISK_BYTES:
        why = "which is too little for a large model's checkpoints"
        return Finding("disk", "warning", f"{message}, {why}: delete ended jobs, or set ACCRUE_DATA_DIR")
    return Finding("disk", "ok", message)


def _sqlite_version(version: tuple[int, int, int]) -> Finding:
    message = ".".join(map(str, version))
    backport = _WAL_RESET_BACKPORTS.get(version[:2])
    if version >= _WAL_RESET_FIXED or (backport is not None and version[2] >= backport):
        return Finding("SQLite", "ok", message)
    return Finding(
        "SQLite", "warning",
        f"{message} works, but has the WAL-reset bug: in very rare cases, a write is lost if another process "
        "copies SQLite's write-ahead log into the database at that moment. To avoid it, use a Python with "
        "SQLite 3.51.3 or newer, or PostgreSQL. Make backups in any case (accrue backup)",
    )  # fmt: skip


def _database(database: Database) -> Iterator[Finding]:
    at, head = current_revision(database), newest_revision()
    if at != head:
        message = f"at revision {at or 'none'}, but this code needs {head}: run accrue migrate"
        yield Finding("database", "error" if at else "warning", message)
        return
    if database.engine.dialect.name == "sqlite":
        with database.engine.connect() as connection:
            (answer,) = connection.execute(text("PRAGMA quick_check(1)")).one()
        if answer != "ok":
            yield Finding(
                "database",
                "error",
                f"damaged: {answer}. Stop the service and the workers, then restore a backup with "
                "accrue restore",
            )
            return
    yield Finding("database", "ok", f"{database.engine.dialect.name}, revision {at}")
    yield from _queue(database)


def _queue(database: Database) -> Iterator[Finding]:
    with database.reading() as session:
        now = session.scalar(select(database_now())) or 0.0
        alive = session.scalar(
            select(func.count()).select_from(Worker).where(Worker.heartbeat_at > now - _SILENT_SECONDS)
        )
        waiting = session.scalar(select(func.count()).select_from(Job).where(Job.status == "queued"))
        orphans = session.scalar(
            select(func.count()).select_from(Job).where(Job.status == "running", Job.lease_until < now)
        )
        refused = session.scalar(select(func.count()).where(ProfileRequest.error.is_not(None)))
    if alive:
        yield Finding("worker", "ok", f"{alive} alive, {waiting or 'no'} jobs waiting")
    else:
        yield Finding(
            "worker",
            "warning",
            f"no worker was seen lately (jobs waiting: {waiting}): start one with accrue worker",
        )
    if orphans:
        yield Finding(
            "jobs",
            "warning",
            f"{orphans} running without a worker: start one with accrue worker, and it continues them",
        )
    if refused:
        yield Finding("profiles", "warning", f"{refused} training steps (model, options and length) "
                      "could not be simulated: their memory is predicted by formula")  # fmt: skip


def _gpus() -> Finding:
    seen = gpus.detected()
    if seen:
        return Finding("GPUs", "ok", ", ".join(f"{gpu.id} {gpu.name}" for gpu in seen))
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "ok", "no nvidia-smi: jobs train on the CPU")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "run nvidia-smi to see why"
    return Finding(
        "GPUs", "warning", f"nvidia-smi is installed but shows no GPU ({why}): jobs train on the CPU"
    )


def _torch() -> Finding:
    """Which build of torch trainers use. It is read from torch's files, since importing it takes seconds."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return Finding("torch", "ok", "not installed: this machine can run the service, but no worker")
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except (OSError, ValueError):
        text = ""
    own = dict(re.findall(r"""^(__version__|cuda|hip)\b[^=\n]*= ["']([^"']+)["']""", text, re.MULTILINE))
    version, runtime = own.get("__version__"), own.get("cuda") or own.get("hip")
    if version is None:
        message = f"{found.origin} is not a whole installation of torch: install it again"
        return Finding("torch", "error", message)
    if runtime is not None:
        kind = "CUDA" if "cuda" in own else "ROCm"
        return Finding(
            "torch", "ok", f"{version}, for {kind} {runtime}: the driver must support that version"
        )
    if gpus.detected():
        return Finding(
            "torch",
            "error",
            f"{version} is a build for CPUs, but there is a GPU: install a CUDA build (pytorch.org says how)",
        )
    return Finding("torch", "ok", f"{version}, for CPUs")


def _models(settings: Settings) -> Finding:
    folder = settings.models_dir
    if folder is None:
        return Finding(
            "models", "ok", "the built-in model and models from the hub; ACCRUE_MODELS_DIR is not set"
        )
    if not folder.is_dir():
        return Finding("models", "error", f"ACCRUE_MODELS_DIR: {folder} is not a folder")
    found = [name for name in base_models.local_names(settings) if name != BUILT_IN_MODEL]
    without = [name for name in found if not any((folder / name).glob("*.safetensors"))]
    if without:
        return Finding("models", "warning", f"no safetensors in {', '.join(without[:5])}: they can be "
                       "planned for, not trained")  # fmt: skip
    return Finding("models", "ok", f"{len(found)} in {folder}")
