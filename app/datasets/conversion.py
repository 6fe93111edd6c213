"""Converts files of other types (JSON, CSV, Parquet, text) to JSON lines, in a process of its own.

The process (`converter.py`) has little memory and no secrets, and ends with the one that started it: a file
may be made to exhaust memory, or to crash a native library.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.datasets.converter import CPU_SECONDS, MEMORY_BYTES, Converted
from app.datasets.file_types import HEAD_BYTES, BadFile, FileType, ReadOptions, file_type_of
from app.errors import InvalidRequest
from app.settings import Settings

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")


def file_type_at(path: Path, name: str, field: str) -> FileType:
    """The type of a stored file.

    Args:
        name: the file's original name.
        field: the request's field that errors name.

    Raises:
        InvalidRequest: the file is of a type that is not supported.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    try:
        return file_type_of(name, head)
    except BadFile as error:
        raise InvalidRequest(str(error), field=field) from None


def convert(
    sources: Iterable[tuple[Path, str]], target: Path, how: ReadOptions, settings: Settings, field: str
) -> Converted:
    """Converts files to one file of JSON lines.

    Args:
        sources: the files, each with its original name.
        target: the new file; what it held before is lost.
        field: the request's field that errors name.

    Raises:
        InvalidRequest: a file cannot be read, or a row is not a valid example.
        OSError: the disk is full.
    """
    order = {
        "sources": [(str(path), name) for path, name in sources],
        "target": str(target),
        "how": asdict(how),
        "max_file_bytes": settings.max_file_bytes,
        "max_line_bytes": settings.max_line_bytes,
    }
    with subprocess.Popen(
        [sys.executable, "-m", f"{PACKAGE_PREFIX}app.datasets.converter"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        | {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"},
        cwd=PACKAGES_FOLDER,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()  # and kept open: the converter exits when its input ends
        answer = process.stdout.readline()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if not answer.endswith(b"\n"):
        raise InvalidRequest(
            f"The file could not be read within {MEMORY_BYTES // 2**20} MiB and {CPU_SECONDS} s of "
            "CPU time: split it into several files, or upload JSON lines.",
            field=field,
        )
    result = json.loads(answer)
    if "errno" in result:
        raise OSError(result["errno"], os.strerror(result["errno"]))
    if "error" in result:
        raise InvalidRequest(result["error"], field=field)
    return Converted(**result)
