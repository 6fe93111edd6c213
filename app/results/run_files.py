"""The parts of a run directory that the service hands out, and their removal with the job."""

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from app.contract.reports import Completions, Operators
from app.settings import Settings

_BLOCK = 2**20


def model_dir(settings: Settings, job_id: str) -> Path:
    return settings.runs_dir / job_id / "model"


def checkpoint_names(settings: Settings, job_id: str) -> set[str]:
    """The checkpoints that a job's run directory holds."""
    return {path.name for path in (settings.runs_dir / job_id / "checkpoints").glob("step-*")}


def remove_run(settings: Settings, job_id: str) -> None:
    """Deletes the run directory of a deleted job."""
    shutil.rmtree(settings.runs_dir / job_id, ignore_errors=True)


def completions(settings: Settings, job_id: str) -> Completions:
    """What the job's model makes of held-back prompts; none as long as it was not asked."""
    path = settings.runs_dir / job_id / "completions.json"
    return Completions.model_validate_json(path.read_bytes()) if path.exists() else Completions(data=())


PROFILE_FILES = ("trace.json", "memory.pickle")
"""What of a profile can be downloaded."""


def operators(settings: Settings, job_id: str) -> Operators | None:
    """The operators of the window that was profiled; null: none was, so far."""
    path = settings.runs_dir / job_id / "profile" / "operators.json"
    return Operators.model_validate_json(path.read_bytes()) if path.exists() else None


def profile_file(settings: Settings, job_id: str, name: str) -> Path | None:
    """A file of a profile, if it is one that can be downloaded and is there."""
    path = settings.runs_dir / job_id / "profile" / name
    return path if name in PROFILE_FILES and path.is_file() else None


def tar_size(folder: Path) -> int:
    """Bytes of `tar_of(folder)`."""
    return sum(512 + _padded(file.stat().st_size) for file in _files(folder)) + 2 * 512


def tar_of(folder: Path, name: str) -> Iterator[bytes]:
    """The files of a folder as a tar, a block at a time, under `name/`."""
    for file in _files(folder):
        stat = file.stat()
        entry = tarfile.TarInfo(f"{name}/{file.name}")
        entry.size, entry.mtime, entry.mode = stat.st_size, int(stat.st_mtime), 0o644
        yield entry.tobuf(tarfile.GNU_FORMAT)
        with file.open("rb") as content:
            while block := content.read(_BLOCK):
                yield block
        yield b"\0" * (_padded(stat.st_size) - stat.st_size)
    yield b"\0" * (2 * 512)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _padded(size: int) -> int:
    return -(-size // 512) * 512
