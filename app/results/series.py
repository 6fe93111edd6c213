"""A job's log lines from the database."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, String, cast, func, literal, select

from app.contract.reports import LogLine, is_usable
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Job, JobEvent, StepMetric

_NAMES = list(LogLine.model_fields)
_COLUMNS = [getattr(StepMetric, name) for name in _NAMES]
_AT_ONCE = 500
"""The maximum number of steps in one query."""
PAGE = 1000
"""The most rows of a page."""
_CHARACTERS_OF_PAGE = 2**20
"""About how much JSON a page's lists have at most: a line may have thousands of values."""
_LISTS = ("micro_losses", "gradient_norms", "ranks", "rewards")
_MOST_DETAILED = 2000
"""The maximum number of points whose long lists are read: with many ranks, a line takes kilobytes."""
_CHARACTERS_OF_POINTS = 2**22
"""The most JSON of the lists of all points together; the longest lists are left out beyond it."""
_MOST_EVENTS = 100_000
"""The most evaluations and metrics of a job that are read, of all attempts together."""
_MOST_METRICS = 50
"""The most metrics of a step."""


def last_step(where: Session | Connection, job_id: str) -> int:
    """The last step that has a row; 0 if there is none."""
    return _first_and_last(where, job_id, 0)[1] or 0


def series(
    where: Session | Connection, job_id: str, from_step: int, points: int | None
) -> list[dict[str, Any]]:
    """A job's log lines from a step on; with `points`, at most that many, evenly spread. Of very many points,
    and if they are very long, the figures of micro-batches, layers and ranks are left out, the longest first.
    """
    if points is None:
        return list(each_step(where, job_id, from_step))
    first, last = _first_and_last(where, job_id, from_step)
    if first is None or last is None:
        return []
    steps: Sequence[int] = range(first, last + 1)
    if len(steps) > points:
        steps = sorted({first + round(i * (last - first) / (points - 1)) for i in range(points)})
    return _lines_at(where, job_id, steps, _short_lists(where, job_id, steps, points))


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
    if steps is not None:  # as text, since a trainer may have written anything
        query = query.where(
            cast(JobEvent.data["step"].as_string(), String).in_([str(step) for step in steps])
        )
    newest = query.order_by(JobEvent.attempt.desc(), JobEvent.id.desc()).limit(_MOST_EVENTS)
    result = where.scalar(select(Job.result).where(Job.id == job_id))
    last = inf  # earlier attempts may have gone further
    if result is not None and result.get("replicas") is None:
        last = result.get("steps", inf)
    found: dict[int, Evaluation] = {}
    metrics: dict[int, dict[str, float]] = {}
    for kind, data in reversed(where.execute(newest).all()):
        if not is_usable(kind, data) or data["step"] > last:
            continue
        step = data["step"]
        known = found.setdefault(step, Evaluation(None, None))
        if kind == "evaluation":
            names = ("token_accuracy", "exact_match", "rewards")
            own = {name: data.get(name) for name in names}
            found[step] = known._replace(loss=data["loss"], **own)
        elif data["value"] is not None:
            of_step = metrics.setdefault(step, {})
            if data["name"] in of_step or len(of_step) < _MOST_METRICS:
                of_step[data["name"]] = data["value"]
    for step, own in metrics.items():
        found[step] = found[step]._replace(metrics=own)
    return dict(sorted(found.items()))


def each_step(where: Session | Connection, job_id: str, from_step: int = 0) -> Iterator[dict[str, Any]]:
    """Every log line of a job from a step on, a page of rows in memory at a time."""
    step: int | None = from_step
    while step is not None:
        lines, step = page_of_steps(where, job_id, step)
        yield from lines


def page_of_steps(
    where: Session | Connection, job_id: str, from_step: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The next log lines from a step on, and the step that the next page starts at; None at the end."""
    columns = [StepMetric.step, sum((_characters(name) for name in _LISTS), literal(0))]
    sizes = where.execute(_steps(columns, job_id, from_step).order_by(StepMetric.step).limit(PAGE)).all()
    if not sizes:
        return [], None
    total, last = 0, sizes[0][0]
    for step, characters in sizes:
        total += characters
        if total > _CHARACTERS_OF_PAGE and step > sizes[0][0]:
            break
        last = step
    chosen = _steps(_COLUMNS, job_id, from_step).where(StepMetric.step <= last).order_by(StepMetric.step)
    is_end = len(sizes) < PAGE and last == sizes[-1][0]
    return _lines(where.execute(chosen).all()), None if is_end else last + 1


def _characters(name: str) -> Any:
    """The length of a list in a row, as JSON."""
    return func.coalesce(func.length(cast(getattr(StepMetric, name), String)), 0)


def pages_of(database: Database, job_id: str, from_step: int = 0) -> Iterator[list[dict[str, Any]]]:
    """A job's log lines from a step on, a page at a time. No connection is held between two pages, so a
    slow reader keeps nobody waiting."""
    step: int | None = from_step
    while step is not None:
        with database.reading() as session:
            lines, step = page_of_steps(session, job_id, step)
        yield lines


def _first_and_last(
    where: Session | Connection, job_id: str, from_step: int
) -> tuple[int | None, int | None]:
    ends = func.min(StepMetric.step), func.max(StepMetric.step)
    first, last = where.execute(_steps(ends, job_id, from_step)).one()
    return first, last


def _short_lists(where: Session | Connection, job_id: str, steps: Sequence[int], points: int) -> set[str]:
    """The lists of these steps' lines that are short enough, together, to be read. Rewards always are."""
    sizes = dict.fromkeys(_LISTS, 0)
    for i in range(0, len(steps), _AT_ONCE):
        sums = [func.sum(_characters(name)) for name in _LISTS]
        row = where.execute(_steps(sums, job_id, 0).where(_is_in(steps[i : i + _AT_ONCE]))).one()
        for name, size in zip(_LISTS, row, strict=True):
            sizes[name] += int(size or 0)
    kept, total = {"rewards"}, 0
    for name in sorted(set(_LISTS) - kept, key=sizes.__getitem__):
        total += sizes[name]
        if total <= _CHARACTERS_OF_POINTS and points <= _MOST_DETAILED:
            kept.add(name)
    return kept


def _is_in(steps: Sequence[int]) -> ColumnElement[bool]:
    return StepMetric.step.in_(steps)


def _lines_at(
    where: Session | Connection, job_id: str, steps: Sequence[int], lists: set[str]
) -> list[dict[str, Any]]:
    """The log lines of some steps, in their order, with these lists; others are None."""
    names = [name for name in _NAMES if name not in _LISTS or name in lists]
    without = {name: None for name in _LISTS if name not in lists}
    columns = [getattr(StepMetric, name) for name in names]
    lines: list[dict[str, Any]] = []
    for i in range(0, len(steps), _AT_ONCE):
        chosen = _steps(columns, job_id, 0).where(_is_in(steps[i : i + _AT_ONCE]))
        rows = where.execute(chosen.order_by(StepMetric.step)).all()
        lines += [{**dict(zip(names, row, strict=True)), **without} for row in rows]
    return lines


def _lines(rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(_NAMES, row, strict=True)) for row in rows]


def _steps(columns: Sequence[Any], job_id: str, from_step: int) -> Select[Any]:
    return select(*columns).where(StepMetric.job_id == job_id, StepMetric.step >= from_step)
