"""A job's log lines out of the database, read by the driver."""

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import BindParameter, Connection, Integer, String, bindparam, cast, func, select
from sqlalchemy.dialects.postgresql import JSONB

from app.contract.reports import LogLine
from app.storage.compiled import Prepared
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import JobEvent, StepMetric

_NAMES = list(LogLine.model_fields)
_COLUMNS = [getattr(StepMetric, name) for name in _NAMES]
_IN_JSON = ("micro_losses", "gradient_norms")
PAGE = 1000


def last_step(where: Session | Connection, job_id: str) -> int:
    """The last step of which there is a row; 0 where there is none."""
    return _between(where, job_id, 0)[1] or 0


def series(
    where: Session | Connection, job_id: str, from_step: int, points: int | None
) -> list[dict[str, Any]]:
    """A job's log lines from a step on; with `points`, at most so many, evenly spread."""
    if points is not None:
        first, last = _between(where, job_id, from_step)
        if first is not None and last is not None and last - first >= points:
            chosen = {first + round(i * (last - first) / (points - 1)) for i in range(points)}
            return _lines(_CHOSEN.run(where, {"id": job_id, "steps": json.dumps(sorted(chosen))}))
    return list(each_step(where, job_id, from_step))


def validation_losses(where: Session | Connection, job_id: str) -> dict[int, float | None]:
    """The loss of each evaluation, by step; of two at a step, the later attempt's."""
    found = [data for (data,) in _EVALUATIONS.run(where, {"id": job_id})]
    told = [json.loads(data) if isinstance(data, str) else data for data in found]
    return {data["step"]: data["loss"] for data in told}


def each_step(where: Session | Connection, job_id: str, from_step: int = 0) -> Iterator[dict[str, Any]]:
    """Every log line of a job from a step on, a page of rows in memory at a time."""
    step: int | None = from_step
    while step is not None:
        lines, step = page_of_steps(where, job_id, step)
        yield from lines


def page_of_steps(
    where: Session | Connection, job_id: str, from_step: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The next log lines from a step on, and the step that the next page starts at; null: there is none."""
    lines = _lines(_FOLLOWING.run(where, {"id": job_id, "step": from_step}))
    return lines, None if len(lines) < PAGE else lines[-1]["step"] + 1


def pages_of(database: Database, job_id: str, from_step: int = 0) -> Iterator[list[dict[str, Any]]]:
    """A job's log lines from a step on, a page at a time, without a connection in between: whoever reads may
    take as long as they like."""
    step: int | None = from_step
    while step is not None:
        with database.reading() as session:
            lines, step = page_of_steps(session, job_id, step)
        yield lines


def _between(where: Session | Connection, job_id: str, from_step: int) -> tuple[int | None, int | None]:
    ((first, last),) = _BETWEEN.run(where, {"id": job_id, "step": from_step})
    return first, last


def _lines(rows: list[Any]) -> list[dict[str, Any]]:
    lines = [dict(zip(_NAMES, row, strict=True)) for row in rows]
    for line in lines:
        for name in _IN_JSON:
            if isinstance(line[name], str):  # as SQLite has it; other drivers read it themselves
                line[name] = json.loads(line[name])
    return lines


def _from_step_on(columns: Any) -> Any:
    job_id: BindParameter[str] = bindparam("id")
    step: BindParameter[int] = bindparam("step")
    return select(*columns).where(StepMetric.job_id == job_id, StepMetric.step >= step)


def _chosen(dialect: str) -> Any:
    steps: BindParameter[str] = bindparam("steps", type_=String)
    chosen = (
        select(cast(func.jsonb_array_elements_text(cast(steps, JSONB)), Integer))
        if dialect == "postgresql"
        else select(func.json_each(steps).table_valued("value").c.value)
    )
    job_id: BindParameter[str] = bindparam("id")
    own = select(*_COLUMNS).where(StepMetric.job_id == job_id, StepMetric.step.in_(chosen))
    return own.order_by(StepMetric.step)


def _evaluations(dialect: str) -> Any:
    job_id: BindParameter[str] = bindparam("id")
    own = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.type == "evaluation")
    return own.order_by(JobEvent.attempt, JobEvent.id)


_EVALUATIONS = Prepared(_evaluations)
_CHOSEN = Prepared(_chosen)
_FOLLOWING = Prepared(lambda dialect: _from_step_on(_COLUMNS).order_by(StepMetric.step).limit(PAGE))
_BETWEEN = Prepared(lambda dialect: _from_step_on((func.min(StepMetric.step), func.max(StepMetric.step))))
