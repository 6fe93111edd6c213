"""What lists of jobs are filtered by."""

from typing import Any

from fastapi import Request
from sqlalchemy import Select

from app.models import Job


def is_filter(name: str) -> bool:
    """Whether a parameter is `metadata[key]`."""
    return name.startswith("metadata[") and name.endswith("]")


def with_metadata(query: Select[Any], request: Request) -> Select[Any]:
    """The jobs that carry every `metadata[key]=value` of the request's query."""
    for name, value in request.query_params.items():
        if is_filter(name):
            query = query.where(Job.labels[name[9:-1]].as_string() == value)
    return query
