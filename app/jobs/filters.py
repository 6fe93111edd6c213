"""Filters of the lists and totals of jobs."""

import json
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from sqlalchemy import ColumnElement, String, cast, literal, or_
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from app.contract.states import JobStatus
from app.errors import Unprocessable
from app.storage.tables import Job

MOST_LABELS = 16


def is_metadata_filter(name: str) -> bool:
    """Whether a parameter is `metadata[key]`."""
    return name.startswith("metadata[") and name.endswith("]")


async def metadata_filters(request: Request) -> list[ColumnElement[bool]]:
    """Conditions on jobs: each must have every `metadata[key]=value` of the request's query. Only routes that
    depend on this accept such parameters.

    Raises:
        Unprocessable: there are more such filters than a job can have metadata entries.
    """
    given = [(name, value) for name, value in request.query_params.items() if is_metadata_filter(name)]
    if len(given) > MOST_LABELS:
        raise Unprocessable(f"A job has at most {MOST_LABELS} metadata keys: give fewer.", field="metadata")
    return [metadata_value(Job.client_metadata, literal(name[9:-1])) == value for name, value in given]


MetadataFilters = Annotated[list[ColumnElement[bool]], Depends(metadata_filters)]
"""Conditions on jobs, by the query's `metadata[key]=value`."""


async def _filters(
    metadata: MetadataFilters,
    status: Annotated[JobStatus | None, Query()] = None,
    user_id: Annotated[str | None, Query(max_length=200)] = None,
    model: Annotated[str | None, Query(max_length=200, description="model_name")] = None,
    since: Annotated[float | None, Query(ge=0, le=2**33, description="Submitted then or later")] = None,
    until: Annotated[
        float | None, Query(ge=0, le=2**33, description="Submitted before; Unix seconds")
    ] = None,
) -> list[ColumnElement[bool]]:
    filters = [*metadata]
    if status is not None:
        filters.append(Job.status == status)
    if user_id is not None:
        own = cast(Job.user_id, String)  # JSON text: escaped in SQLite, not in PostgreSQL
        written = {user_id, json.dumps(user_id), json.dumps(user_id, ensure_ascii=False)}
        filters.append(or_(*(own == each for each in sorted(written))))
    if model is not None:
        filters.append(Job.model_name == model)
    if since is not None:
        filters.append(Job.created_at >= since)
    if until is not None:
        filters.append(Job.created_at < until)
    return filters


Filters = Annotated[list[ColumnElement[bool]], Depends(_filters)]
"""Conditions on jobs, by the query: `status`, `user_id`, `model`, `since`, `until`, `metadata[key]=value`."""


class metadata_value(FunctionElement[str]):  # noqa: N801
    """A member of a JSON object by name, such as a key of a job's metadata; unlike in a JSON path, the name
    may contain quotes."""

    type = String()
    inherit_cache = True


@compiles(metadata_value, "sqlite")
def _sqlite_metadata_value(element: metadata_value, compiler: SQLCompiler, **kw: Any) -> str:
    column, name = element.clauses
    own, key = compiler.process(column, **kw), compiler.process(name, **kw)
    return f"(SELECT value FROM json_each({own}) WHERE key = {key})"


@compiles(metadata_value, "postgresql")
def _postgresql_metadata_value(element: metadata_value, compiler: SQLCompiler, **kw: Any) -> str:
    column, name = element.clauses
    return f"({compiler.process(column, **kw)} ->> {compiler.process(name, **kw)})"
