"""Options that several commands share."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from app.cli.client import Client, ServiceError

DEFAULT_URL = "http://127.0.0.1:8000"
_COMPLETION_SECONDS = 1.0

Url = Annotated[str, typer.Option("--url", envvar="ACCRUE_URL", help="Address of the service")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's answer as JSON")]


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


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
