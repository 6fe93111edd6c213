"""A job's log lines from the database."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, String, cast, func, select

from app.contract.reports import LogLine, is_usable
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Job, JobEvent, StepMetric

_NAMES = list(LogLine.model_fields)
_COLUMNS = [getattr(StepMetric, name) for name in _NAMES]
_AT_ONCE = 500
"""The maximum number of steps in one query."""
PAGE, FIRST_PAGE = 1000, 20
"""The most rows of a page, and of the first one, by which the next ones are sized."""
_VALUES_OF_PAGE = 50_000
"""About how many values of `_LISTS` a page holds: a line may have thousands."""
_LISTS = ("micro_losses", "gradient_norms", "ranks", "rewards")
_MOST_LIST_CHARACTERS = 2**22
_MOST_DETAILED = 2000
"""The maximum number of points whose lists are read: with many ranks, a line takes kilobytes."""


def last_step(where: Session | Connection, job_id: str) -> int:
    """The last step that has a row; 0 if there is none."""
    return _first_and_last(where, job_id, 0)[1] or 0


def series(
    where: Session | Connection, job_id: str, from_step: int, points: int | None
) -> list[dict[str, Any]]:
    """A job's log lines from a step on; with `points`, at most that many, evenly spread. If there are very
    many, or their nested values (`_LISTS`) are very long, these are left out."""
    if points is not None:
        first, last = _first_and_last(where, job_id, from_step)
        if first is not None and last is not None and last - first >= points:
            chosen = {first + round(i * (last - first) / (points - 1)) for i in range(points)}
            steps = sorted(chosen)
            detailed = points <= _MOST_DETAILED and not _have_long_lists(where, job_id, steps)
            return _lines_at(where, job_id, steps, detailed=detailed)
    return list(each_step(where, job_id, from_step))


class Evaluation(NamedTuple):
    """What an evaluation found on held-out samples; null if it was not finite, or not measured."""

    loss: float | None
    token_accuracy: float | None
    exact_match: float | None = None
    rewards: dict[str, float | None] | None = None
    """With a preference objective or reward (app/contract/reports.py: Rewards)."""
    metrics: dict[str, float] | None = None
    """The operator's own metrics, by name."""


def evaluations(
    where: Session | Connection, job_id: str, steps: Sequence[int] | None = None
) -> dict[int, Evaluation]:
    """What each evaluation found, by step in order; if a step was evaluated twice, the evaluation of
    the later attempt is used. The operator's own metrics are also computed before the first step (at step 0)
    and after the last.

    Args:
        steps: only those of these steps; None: all, of which there are at most `MAX_EVALUATIONS`.
    """
    of_evaluations = JobEvent.type.in_(("evaluation", "metric"))
    query = select(JobEvent.type, JobEvent.data).where(JobEvent.job_id == job_id, of_evaluations)
    if steps is not None:
        query = query.where(JobEvent.data["step"].as_integer().in_(steps))
    result = where.scalar(select(Job.result).where(Job.id == job_id))
    last = inf  # earlier attempts may have gone further
    if result is not None and result.get("replicas") is None:
        last = result.get("steps", inf)
    found: dict[int, Evaluation] = {}
    for kind, data in where.execute(query.order_by(JobEvent.attempt, JobEvent.id)):
        if not is_usable(kind, data) or data["step"] > last:
            continue
        known = found.get(data["step"], Evaluation(None, None))
        if kind == "evaluation":
            names = ("token_accuracy", "exact_match", "rewards")
            own = {name: data.get(name) for name in names}
            found[data["step"]] = known._replace(loss=data["loss"], **own)
        elif data["value"] is not None:
            metrics = {**(known.metrics or {}), data["name"]: data["value"]}
            found[data["step"]] = known._replace(metrics=metrics)
    return dict(sorted(found.items()))


def each_step(where: Session | Connection, job_id: str, from_step: int = 0) -> Iterator[dict[str, Any]]:
    """Every log line of a job from a step on, a page of rows in memory at a time."""
    at: PageStart | None = PageStart(from_step)
    while at is not None:
        lines, at = page_of_steps(where, job_id, at)
        yield from lines


class PageStart(NamedTuple):
    """Where a page of log lines begins, and its size."""

    step: int
    rows: int = FIRST_PAGE


def page_of_steps(
    where: Session | Connection, job_id: str, at: PageStart
) -> tuple[list[dict[str, Any]], PageStart | None]:
    """The next log lines, and where the page after them begins; None at the end."""
    following = _steps(_COLUMNS, job_id, at.step).order_by(StepMetric.step).limit(at.rows)
    lines = _lines(where.execute(following).all())
    if len(lines) < at.rows:
        return lines, None
    values = sum(len(line[name] or ()) for line in lines for name in _LISTS)
    rows = min(PAGE, max(1, _VALUES_OF_PAGE * len(lines) // max(1, values)))
    return lines, PageStart(lines[-1]["step"] + 1, rows)


def pages_of(database: Database, job_id: str, from_step: int = 0) -> Iterator[list[dict[str, Any]]]:
    """A job's log lines from a step on, a page at a time. No connection is held between two pages, so a
    slow reader keeps nobody waiting."""
    at: PageStart | None = PageStart(from_step)
    while at is not None:
        with database.reading() as session:
            lines, at = page_of_steps(session, job_id, at)
        yield lines


def _first_and_last(
    where: Session | Connection, job_id: str, from_step: int
) -> tuple[int | None, int | None]:
    ends = func.min(StepMetric.step), func.max(StepMetric.step)
    first, last = where.execute(_steps(ends, job_id, from_step)).one()
    return first, last


def _have_long_lists(where: Session | Connection, job_id: str, steps: Sequence[int]) -> bool:
    """Whether the nested values of these steps' lines have more than `_MOST_LIST_CHARACTERS` as JSON."""
    lists = [func.length(cast(getattr(StepMetric, name), String)) for name in _LISTS]
    total = 0
    for i in range(0, len(steps), _AT_ONCE):
        chosen = _steps([func.sum(func.coalesce(each, 0)) for each in lists], job_id, 0)
        row = where.execute(chosen.where(StepMetric.step.in_(steps[i : i + _AT_ONCE]))).one()
        total += sum(int(each or 0) for each in row)
    return total > _MOST_LIST_CHARACTERS


def _lines_at(
    where: Session | Connection, job_id: str, steps: Sequence[int], *, detailed: bool
) -> list[dict[str, Any]]:
    """The log lines of some steps, in their order."""
    names = _NAMES if detailed else [name for name in _NAMES if name not in _LISTS]
    without = {} if detailed else dict.fromkeys(_LISTS)
    columns = [getattr(StepMetric, name) for name in names]
    lines: list[dict[str, Any]] = []
    for i in range(0, len(steps), _AT_ONCE):
        chosen = _steps(columns, job_id, 0).where(StepMetric.step.in_(steps[i : i + _AT_ONCE]))
        rows = where.execute(chosen.order_by(StepMetric.step)).all()
        lines += [{**dict(zip(names, row, strict=True)), **without} for row in rows]
    return lines


def _lines(rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(_NAMES, row, strict=True)) for row in rows]


def _steps(columns: Sequence[Any], job_id: str, from_step: int) -> Select[Any]:
    return select(*columns).where(StepMetric.job_id == job_id, StepMetric.step >= from_step)
