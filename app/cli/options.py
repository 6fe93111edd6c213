"""Options that several commands share."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from app.cli.client import Client, ServiceError

DEFAULT_URL = "http://127.0.0.1:8000"
_COMPLETION_SECONDS = 1.0

Url = Annotated[str, typer.Option("--url", envvar="ACCRUE_URL", help="Address of the service")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="FIELD=COLUMN",
        help="Which column of the file holds a field, as in prompt=question; may be given several times",
    ),
]
SampleBy = Annotated[
    str | None,
    typer.Option(help="What becomes one sample of a text file: document (default), paragraph or line"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's response as JSON")]


def _complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Completions for a shell: the newest jobs, each with its model and state."""
    try:
        with Client(os.environ.get("ACCRUE_URL", DEFAULT_URL), timeout_seconds=_COMPLETION_SECONDS) as client:
            page = client.get("/gradient-accumulation/training", params={"limit": 50})
    except ServiceError:
        return []
    return [
        (job["id"], f"{job['status']}, {job['model_name']}")
        for job in page["data"]
        if job["id"].startswith(incomplete)
    ]


Job = Annotated[str, typer.Argument(help="ftjob-…", autocompletion=_complete_job, show_default=False)]
NewestJob = Annotated[
    str, typer.Argument(help="ftjob-…; the newest job if left out", autocompletion=_complete_job)
]


NewestModel = Annotated[
    str,
    typer.Argument(
        help="ftjob-…; if left out, the newest job that has a model", autocompletion=_complete_job
    ),
]


def columns_of(given: list[str] | None) -> dict[str, str] | None:
    """The columns that `--column` assigns to fields.

    Raises:
        typer.BadParameter: one of them has no `=`.
    """
    pairs = [each.partition("=") for each in given or []]
    for field, equals, column in pairs:
        if not (field and equals and column):
            shown = f"{field}{equals}{column}"
            raise typer.BadParameter(f"{shown!r} is not FIELD=COLUMN", param_hint="--column")
    return {field: column for field, _, column in pairs} or None


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def named_values(given: list[str] | None, option: str) -> dict[str, str] | None:
    """The values of an option that may be repeated, such as --require, by name; None if there are none.

    Raises:
        typer.BadParameter: one is not of the form NAME=VALUE, or a name is given twice.
    """
    parts = [each.partition("=") for each in given or ()]
    for name, equals, value in parts:
        if not (name and equals and value):
            raise typer.BadParameter(f"{name!r} is not of the form NAME=VALUE", param_hint=option)
    found = {name: value for name, _, value in parts}
    if len(found) < len(parts):
        raise typer.BadParameter("a name is given twice", param_hint=option)
    return found or None
