"""`python -m app.datasets.converter` converts files to JSON lines: an order as a line of JSON in, the result
as a line of JSON out."""

import contextlib
import errno
import importlib
import json
import os
import resource
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.contract.data_formats import BadLine, Classes, DataFormat, parse_line
from app.contract.row_shapes import BadShape, mapped
from app.datasets.file_types import HEAD_BYTES, BadFile, FileType, ReadOptions, file_type_of, read_rows

MEMORY_BYTES = 2**30
"""The process's limit of memory, in addition to what its libraries map."""
CPU_SECONDS = 1800
_NICENESS = 10


@dataclass(frozen=True)
class Converted:
    """What was written."""

    format: DataFormat
    examples: int
    classes: tuple[str, ...] | None = None
    """See `Classes.found`."""


def main() -> None:
    """Runs the process."""
    order = json.loads(sys.stdin.buffer.readline())
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        _load_libraries(order)
        _limit_memory()
        result = asdict(_write(order))
    except ImportError as error:
        package = str(error.name).split(".")[0]
        result = {"error": f"Reading this kind of file needs the Python package {package}."}
    except (BadFile, BadLine) as error:
        result = {"error": str(error)}
    except MemoryError:
        result = {"error": f"A row takes more than {MEMORY_BYTES // 2**20} MiB to read: write smaller rows."}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of libraries, on damaged files
        result = {"error": f"It cannot be read ({type(error).__name__})."}
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        result = {"errno": error.errno} if is_full else {"error": f"It cannot be read ({error.strerror})."}
    sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # the thread that waits for the parent's end would disturb Python's finalisation


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _load_libraries(order: dict[str, Any]) -> None:
    """Loads what the files need, before memory is limited."""
    for path, name in order["sources"]:
        with contextlib.suppress(BadFile, OSError), Path(path).open("rb") as file:
            library = _LIBRARIES.get(file_type_of(name, file.read(HEAD_BYTES)))
            if library is not None:
                importlib.import_module(library)


_LIBRARIES: Mapping[FileType, str] = {"parquet": "pyarrow.parquet"}


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped_bytes = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = mapped_bytes + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(order: dict[str, Any]) -> Converted:
    how, longest = ReadOptions(**order["how"]), order["max_line_bytes"]
    form: DataFormat | None = None
    examples = written = 0
    classes = Classes()
    with Path(order["target"]).open("wb") as target:
        for path, name in order["sources"]:
            with Path(path).open("rb") as file:
                container = file_type_of(name, file.read(HEAD_BYTES))
            for number, row in read_rows(
                Path(path), name, container, sample_by=how.sample_by, longest=longest
            ):
                where = f"{'Line' if container == 'jsonl' else 'Row'} {number}"
                where += f" of {name}" if len(order["sources"]) > 1 else ""
                line = _line(row, how, where)
                if len(line) > longest:
                    raise BadFile(
                        f"{where} is longer than {longest} bytes (ACCRUE_MAX_LINE_BYTES): split it into "
                        "several samples."
                    )
                try:
                    form, example = parse_line(line, form)
                except BadLine as error:
                    raise BadFile(f"{where}: {error}.") from None
                written += len(line) + 1
                if written > order["max_file_bytes"]:
                    raise BadFile(
                        f"The samples take more than {order['max_file_bytes']} bytes as JSON lines "
                        "(ACCRUE_MAX_FILE_BYTES)."
                    )
                target.write(line + b"\n")
                classes.note(example)
                examples += 1
    if form is None:
        raise BadFile("The file has no sample.")
    return Converted(form, examples, classes.found())


def _line(row: Any, how: ReadOptions, where: str) -> bytes:
    """The row as a line of JSON."""
    try:
        if how.columns and isinstance(row, dict):
            row = mapped(row, how.columns)
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode()
    except BadShape as error:
        raise BadFile(f"{where} {error}.") from None
    except UnicodeEncodeError:
        raise BadFile(f"{where} has a lone surrogate.") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFile(f"{where} cannot be written as JSON ({str(error)[:120]}).") from None


def _as_text(value: Any) -> str | None:
    """Converts a value that JSON cannot represent: UTF-8 bytes to text, other bytes to null, anything else to
    its string form."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
        return None
    return str(value)


if __name__ == "__main__":
    main()
