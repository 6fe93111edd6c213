"""A job's log lines as CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import Response
from sqlalchemy.orm import Session

from app.contract.reports import LogLine
from app.results.series import series, validation_losses

VALIDATION = "valid_loss"


COLUMNS = tuple(name for name in LogLine.model_fields if name not in ("micro_losses", "gradient_norms"))


def csv_answer(session: Session, training_id: str) -> Response:
    """All of a job's steps, one a row."""
    lines = series(session, training_id, 0, None)
    return csv_response(lines, training_id, validation_losses(session, training_id))


def csv_response(
    rows: Sequence[dict[str, Any]], training_id: str, evaluated: Mapping[int, float | None]
) -> Response:
    return Response(
        csv_of(rows, evaluated),
        media_type="text/csv",
        headers={"Content-Disposition": f'attachment; filename="{training_id}.csv"'},
    )


def csv_of(rows: Sequence[dict[str, Any]], evaluated: Mapping[int, float | None]) -> str:
    """Log lines as CSV, with a header.

    Args:
        evaluated: the validation loss by step; it stays empty at the other steps.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, (*COLUMNS, VALIDATION), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**row, VALIDATION: evaluated.get(row["step"])} for row in rows)
    return out.getvalue()
