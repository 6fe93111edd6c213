"""The types of files that samples come in, and how each is read row by row, in bounded memory except for a
JSON file that is one object."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.contract.data_formats import why_not_json
from app.contract.row_shapes import ColumnField

FileType = Literal["jsonl", "json", "csv", "parquet", "text"]
SampleBy = Literal["document", "paragraph", "line"]
"""What becomes one sample of a plain text file; paragraphs are separated by empty lines."""

Row = tuple[int, dict[str, Any]]
"""A row's number in its file, from 1, and its values."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
HEAD_BYTES = 4096

_PARQUET = b"PAR1"
_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'"[^"]*"')
_ROWS_AT_ONCE = 64
_ROWS_BELOW = ("data", "train", "examples", "samples", "rows", "instances")
"""Keys of a JSON object below which files keep their samples."""
_BELOW = re.compile(rf'"({"|".join(_ROWS_BELOW)})"\s*:\s*\[\s*\{{'.encode())
_UNREADABLE = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "CSV"),
    **dict.fromkeys((".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".tar", ".arrow", ".feather"),
                    "CSV, JSONL or Parquet"),
}  # fmt: skip
"""Types of files that are often uploaded although they cannot be read, and what to save them as."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class ReadOptions:
    """How files are to be read."""

    columns: Mapping[ColumnField, str] = field(default_factory=dict)
    """Maps our fields to the file's columns; empty to recognise them by their names."""
    sample_by: SampleBy = "document"


class BadFile(ValueError):
    """A file that cannot be read as its type; the message says why."""


def file_type_of(name: str, head: bytes) -> FileType:
    """The type of a file, by its first bytes and its name; files of unknown types are taken for JSON lines.

    Args:
        head: the first `HEAD_BYTES` bytes.

    Raises:
        BadFile: the file is of a type that is not supported.
    """
    suffix = Path(name).suffix.lower()
    if head.startswith(_PARQUET):
        return "parquet"
    if suffix == ".parquet":
        raise BadFile("This is not a Parquet file, although its name ends in .parquet.")
    if suffix in _UNREADABLE:
        raise BadFile(
            f"Files whose names end in {suffix} cannot be read: save the file as {_UNREADABLE[suffix]}."
        )
    if suffix in (".csv", ".tsv"):
        return "csv"
    if head.startswith(_UTF_16):
        raise BadFile(
            "Not UTF-8 text, but UTF-16, as some Windows programs write it: save the file as UTF-8."
        )
    if suffix in (".txt", ".md"):
        return "text"
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    is_document = suffix == ".json" and start.startswith(b"{") and not _is_sample(start)
    return "json" if start.startswith(b"[") or is_document else "jsonl"


def _is_sample(start: bytes) -> bool:
    """Whether the first line of a .json file is a sample, so that the file has JSON lines."""
    line, has_end, _ = start.partition(b"\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return not has_end and not _BELOW.search(line)  # a line longer than the head
    return isinstance(first, dict) and not (first.keys() & set(_ROWS_BELOW))


def read_rows(
    path: Path, name: str, container: FileType, *, sample_by: SampleBy = "document", longest: int = 2**23
) -> Iterator[Row]:
    """The rows of a file; a text file has rows with the one key `text`.

    Args:
        longest: about the most bytes of a row (of CSV: of a cell; Parquet files have no limit). Documents of
            a text file with more than a quarter as many characters are divided, at the end of a line if
            possible.

    Raises:
        BadFile: the file cannot be read; where rows are numbered, the message gives the row's number.
    """
    match container:
        case "jsonl":
            return _json_lines(path, longest)
        case "json":
            return _json(path, longest)
        case "csv":
            return _csv(path, name, longest)
        case "parquet":
            return _parquet(path)
        case "text":
            return _text(path, sample_by, longest)


def _json_lines(path: Path, longest: int) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise BadFile(f"Line {number} is longer than {longest} bytes.")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise BadFile(f"Line {number}: not UTF-8 text ({error.reason}).") from None
            except (ValueError, RecursionError) as error:
                raise BadFile(f"Line {number}: not valid JSON ({why_not_json(error)}).") from None


def _json(path: Path, longest: int) -> Iterator[Row]:
    """The items of an array, or of the array in an object such as {"data": […]}."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_object = file.read(HEAD_BYTES).lstrip().startswith("{")
            file.seek(0)
            items = _items_below(json.load(file)) if is_object else _items(file, longest)
            for number, row in enumerate(items, start=1):
                yield number, row
    except UnicodeDecodeError as error:
        raise BadFile(f"Not UTF-8 text after row {number} ({error.reason}).") from None
    except RecursionError:
        raise BadFile(f"Row {number + 1} is nested too deeply.") from None
    except ValueError as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"Not valid JSON after row {number} ({str(error)[:120]}).") from None


def _items_below(document: dict[str, Any]) -> list[Any]:
    """The samples of a file that is one object; such an object may also be a sample itself."""
    if isinstance(document.get("messages"), list):
        return [document]
    lists = [key for key in _ROWS_BELOW if isinstance(document.get(key), list) and document[key]]
    if len(lists) > 1:
        raise BadFile(f"The object has several lists of samples ({', '.join(lists)}): keep one of them.")
    found: list[Any] = document[lists[0]] if lists else [document]
    return found


def _items(file: io.TextIOWrapper, longest: int) -> Iterator[Any]:
    """The items of a JSON array, of which one at a time is in memory.

    Raises:
        ValueError: it is not valid JSON.
        RecursionError: an item is nested too deeply.
    """
    decoder, at_end, is_first = json.JSONDecoder(), False, True
    text = file.read(HEAD_BYTES).lstrip().removeprefix("[")
    at = 0
    while True:
        at = _after_space(text, at)
        start = at
        if not is_first and text.startswith(",", at):
            start = _after_space(text, at + 1)
        elif text.startswith("]", at):
            _check_end(text[at + 1 :], file)
            return
        elif not is_first and (at < len(text) or at_end):
            raise ValueError("expected a comma or the end of the array")
        try:
            if start == len(text) or (not is_first and start == at):
                raise ValueError("the array is not closed: the file may be truncated")
            item, at = decoder.raw_decode(text, start)
        except ValueError:
            more = "" if at_end else file.read(max(HEAD_BYTES, len(text) - at))
            at_end = not more
            if at_end:
                raise
            text, at = text[at:] + more, 0
            if len(text) > 2 * longest:
                raise BadFile(f"A row is longer than {longest} bytes, or is not valid JSON.") from None
            continue
        yield item
        is_first = False


_SPACE = re.compile(r"\s*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def _check_end(text: str, file: io.TextIOWrapper) -> None:
    """Checks that nothing follows an array, such as a second one.

    Raises:
        ValueError: something does.
    """
    while not text.strip():
        text = file.read(HEAD_BYTES)
        if not text:
            return
    raise ValueError("there is more after the end of the array: join arrays into one, or write JSON lines")


def _csv(path: Path, name: str, longest: int) -> Iterator[Row]:
    csv.field_size_limit(longest)
    with path.open("rb") as raw:
        wide = raw.read(2) in _UTF_16  # as spreadsheets write Unicode text
        raw.seek(0)
        with io.TextIOWrapper(raw, encoding="utf-16" if wide else "utf-8-sig", newline="") as text:
            yield from _cells(text, Path(name).suffix.lower() == ".tsv")


def _cells(text: io.TextIOWrapper, is_tsv: bool) -> Iterator[Row]:
    number = 0
    try:
        first = text.readline(HEAD_BYTES)
        delimiter = "\t" if is_tsv else max(_DELIMITERS, key=_QUOTED.sub("", first).count)
        text.seek(0)
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(rows, [])
        unnamed = [place for place, name in enumerate(header) if not name.strip()]
        if len(unnamed) == 1:  # a column like any other, as in tables that number their rows
            unnamed = []
        left_out = set(unnamed)  # columns that were cleared in a spreadsheet
        kept = [place for place in range(len(header)) if place not in left_out]
        names = [header[place] for place in kept]
        if len(set(names)) < len(names):
            raise BadFile("Two columns have the same name: the first row must have a name for each column.")
        number = 1
        for number, cells in enumerate(rows, start=2):  # the header is row 1, as in a spreadsheet
            if not any(cell.strip() for cell in cells):
                continue  # spreadsheets save cleared rows as delimiters
            if len(cells) != len(header):
                raise BadFile(
                    f"Row {number} has {len(cells)} cell{'s' * (len(cells) != 1)}, but there are "
                    f"{len(header)} columns: write cells that contain the delimiter or line breaks in double "
                    "quotes."
                )
            for place in unnamed:
                if cells[place].strip():
                    raise BadFile(f"Row {number} has content in column {place + 1}, which has no name.")
            yield number, dict(zip(names, [cells[place] for place in kept], strict=True))
    except UnicodeError as error:
        where = f"in row {number + 1} or soon after"  # text is decoded block by block
        raise BadFile(f"Not UTF-8 text {where} ({error.reason}): save it as UTF-8.") from None  # type: ignore[attr-defined]
    except csv.Error as error:
        raise BadFile(f"Not valid CSV after row {number} ({error}).") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise BadFile("Two columns have the same name.")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False):
                for row in _with_times_as_text(batch).to_pylist():
                    number += 1
                    yield number, _without_padding(row)
    except pa.ArrowMemoryError:
        raise BadFile(f"The rows after row {number} take too much memory: write smaller rows.") from None
    except BadFile:
        raise
    except (pa.ArrowException, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise BadFile(f"Not a valid Parquet file after row {number} ({reason}).") from None


def _with_times_as_text(batch: Any) -> Any:
    """A batch in which dates and times are text, and durations are numbers, nested ones too: Python has no
    nanoseconds and fewer years."""
    for number, column in enumerate(batch.columns):
        kind = _without_times(column.type)
        if kind != column.type:
            batch = batch.set_column(number, batch.schema.names[number], _cast(column, kind))
    return batch


def _cast(column: Any, kind: Any) -> Any:
    """The column as another type. Times of an unknown time zone are taken to be in UTC."""
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        if not pa.types.is_timestamp(column.type):
            raise
        return column.cast(pa.timestamp(column.type.unit, "UTC")).cast(kind)


def _without_times(kind: Any) -> Any:
    """An Arrow type in which text takes the place of dates and times, and numbers that of durations."""
    import pyarrow as pa

    def inner(field: Any) -> Any:
        return field.with_type(_without_times(field.type))

    types = pa.types
    if types.is_dictionary(kind):
        values = _without_times(kind.value_type)
        return kind if values == kind.value_type else values
    if types.is_temporal(kind):
        return pa.int64() if types.is_duration(kind) else pa.string()
    if types.is_struct(kind):
        return pa.struct([inner(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    return kind


def _without_padding(value: Any) -> Any:
    """The value without the fields that Arrow adds to each struct for those of other rows."""
    if isinstance(value, dict):
        return {key: _without_padding(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):  # a map
        return {str(key): _without_padding(each) for key, each in value}
    if isinstance(value, list):
        return [_without_padding(each) for each in value]
    return value


def _text(path: Path, sample_by: SampleBy, longest: int) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline=None) as file:
            for number, text in enumerate(_samples(file, sample_by, longest // 4), start=1):
                yield number, {"text": text}
    except UnicodeDecodeError as error:
        raise BadFile(f"Not UTF-8 text ({error.reason}): save the file as UTF-8.") from None


def _samples(lines: io.TextIOWrapper, sample_by: SampleBy, longest: int) -> Iterator[str]:
    """Texts of at most `longest` characters."""
    if sample_by == "line":
        for line in _limited(lines, longest):
            if line.strip():
                yield line.rstrip("\n")
        return
    kept: list[str] = []
    size = 0
    for line in _limited(lines, longest):
        ends = sample_by == "paragraph" and not line.strip()
        if ends or size + len(line) > longest:
            yield from _joined(kept)
            kept, size = [], 0
        if not ends:
            kept.append(line)
            size += len(line)
    yield from _joined(kept)


def _limited(lines: io.TextIOWrapper, longest: int) -> Iterable[str]:
    return iter(lambda: lines.readline(longest), "")


def _joined(lines: list[str]) -> Iterator[str]:
    text = "".join(lines).strip("\n")
    if text.strip():
        yield text
