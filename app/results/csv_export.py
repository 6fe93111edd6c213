"""A job's log lines as CSV."""

import csv
import io
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi.responses import Response

from app.contract.reports import LogLine, Rewards
from app.results.series import Evaluation, evaluations, pages_of
from app.storage.database import Database

VALIDATION = ("valid_loss", "valid_mean_token_accuracy", "valid_exact_match")


_NESTED = ("micro_losses", "gradient_norms", "ranks", "rewards")
_COLUMNS = tuple(name for name in LogLine.model_fields if name not in _NESTED)
_REWARDS = {f"reward_{name}": name for name in Rewards.model_fields}
"""The columns of what a preference objective, or reward, measured; empty with others."""
_HEADER = (*_COLUMNS, *_REWARDS, *VALIDATION)
_NONE = Evaluation(None, None)


def csv_lines(
    pages: Iterable[Sequence[dict[str, Any]]], evaluated: Mapping[int, Evaluation]
) -> Iterator[str]:
    """Log lines as CSV, with a header, a page at a time.

    Args:
        evaluated: the evaluations by step; their columns are empty at other steps.
    """
    names = sorted({name for each in evaluated.values() for name in each.metrics or ()})
    header = (*_HEADER, *(f"valid_{name}" for name in names))
    yield _rows(header, [dict(zip(header, header, strict=True))])
    for page in pages:
        yield _rows(header, (_with_nested(row, evaluated.get(row["step"], _NONE), names) for row in page))


def _with_nested(row: dict[str, Any], evaluation: Evaluation, names: Sequence[str]) -> dict[str, Any]:
    """A log line with columns for its rewards, for what an evaluation found, and for the operator's
    metrics."""
    rewards, metrics = row["rewards"] or {}, evaluation.metrics or {}
    return {
        **row,
        **{column: rewards.get(name) for column, name in _REWARDS.items()},
        **dict(zip(VALIDATION, evaluation[: len(VALIDATION)], strict=True)),
        **{f"valid_{name}": metrics.get(name) for name in names},
    }


def _rows(header: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    csv.DictWriter(out, header, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return out.getvalue()


def csv_response(
    lines: Iterator[str] | AsyncIterator[str], training_id: str, stream: Callable[..., Response]
) -> Response:
    return stream(
        lines,
        media_type="text/csv",
        headers={"Content-Disposition": f'attachment; filename="{training_id}.csv"'},
    )


def csv_of_job(database: Database, training_id: str) -> Iterator[str]:
    """All of a job's steps."""
    with database.reading() as session:
        evaluated = evaluations(session, training_id)
    return csv_lines(pages_of(database, training_id), evaluated)


_SIZES: dict[str, int] = {}
_MAX_CACHED_SIZES = 10_000


def csv_bytes(database: Database, training_id: str) -> int:
    """The size in bytes of an ended job's CSV. The CSV is generated once to measure it, and the size is
    cached."""
    if training_id not in _SIZES:
        if len(_SIZES) >= _MAX_CACHED_SIZES:
            _SIZES.clear()
        _SIZES[training_id] = sum(len(part.encode()) for part in csv_of_job(database, training_id))
    return _SIZES[training_id]
