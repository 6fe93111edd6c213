"""Commands for existing jobs: follow, stop, compare, download."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.client import Client
from app.cli.options import (
    DEFAULT_URL,
    AsJson,
    Job,
    NewestJob,
    NewestModel,
    Url,
    named_values,
    without_none,
)
from app.contract.objective import OF_SEQUENCES
from app.errors import NotFound

commands = typer.Typer()

ROOT = "/gradient-accumulation/training"


@commands.command()
def watch(job_id: NewestJob = "", url: Url = DEFAULT_URL) -> None:
    """Follow a job: step, loss, tokens per second, time left. Exit status 0 if it succeeds."""
    from app.cli.terminal import follow

    with Client(url) as client:
        sys.exit(follow(client, job_id or _newest(client)))


@commands.command()
def jobs(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    status: Annotated[str | None, typer.Option(help="queued, running, paused, succeeded, …")] = None,
    user: Annotated[str | None, typer.Option(help="Only jobs with this user_id")] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs with this metadata; may be repeated", metavar="NAME=VALUE"),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from app.cli.terminal import show_jobs

    with Client(url) as client:
        own = named_values(metadata, "--metadata") or {}
        noted = {f"metadata[{name}]": value for name, value in own.items()}
        fields = {"limit": limit, "status": status, "user_id": user, **noted}
        page = client.get(ROOT, params=without_none(fields))
    if as_json:
        typer.echo(json.dumps(page, indent=2))
    else:
        show_jobs(page["data"], filtered=bool(status or user or metadata))


@commands.command()
def pause(job_id: Job, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Pause a job: a running one writes a checkpoint and releases its device."""
    _act(job_id, "pause", url, as_json)


@commands.command()
def resume(job_id: Job, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Resume a job that is paused or timed out, or start one that was submitted paused."""
    _act(job_id, "resume", url, as_json)


@commands.command()
def cancel(job_id: Job, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Cancel a job: no model is saved. Its checkpoints are kept until it is deleted."""
    _act(job_id, "cancel", url, as_json)


@commands.command()
def stop(job_id: Job, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Finish a job now, and save the current weights as its model."""
    _act(job_id, "stop", url, as_json)


@commands.command()
def retry(job_id: Job, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Train a failed or cancelled job again, as a new job."""
    _act(job_id, "retry", url, as_json)


@commands.command()
def delete(job_id: Job, url: Url = DEFAULT_URL) -> None:
    """Delete a job that has ended, with its model, checkpoints and log."""
    with Client(url) as client:
        client.delete(f"{ROOT}/{job_id}")
    typer.echo(f"{job_id} is deleted")


@commands.command()
def logs(
    job_id: NewestJob = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep following events until the job ends")
    ] = False,
    steps: Annotated[bool, typer.Option("--steps", help="The log of every step, as JSON lines")] = False,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines")] = False,
) -> None:
    """Show a job's events, oldest first, or with --steps its log."""
    from app.cli.tables import show_event

    with Client(url) as client:
        job_id = job_id or _newest(client)
        if steps:
            for line in client.lines(f"{ROOT}/{job_id}/log"):
                typer.echo(line)
            return
        events = client.events(f"{ROOT}/{job_id}/events") if follow else _events(client, job_id)
        for event in events:
            if as_json:
                typer.echo(json.dumps(event))
            else:
                show_event(event)


@commands.command()
def compare(
    job_ids: Annotated[list[str], typer.Argument(help="Two to ten jobs", show_default=False)],
    png: Annotated[
        Path | None, typer.Option(help="Also draw the losses into this file", dir_okay=False)
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Compare jobs: losses at the same number of samples seen; noise, speed and memory of each."""
    from app.cli.tables import show_comparison

    if len(job_ids) < 2:
        raise typer.BadParameter("name at least two jobs: accrue jobs lists them", param_hint="JOB_IDS")
    path, ids = "/gradient-accumulation/stats/compare", [("ids", job_id) for job_id in job_ids]
    with Client(url) as client:
        compared = client.get(path, params=ids)
        if png is not None:
            png.write_bytes(client.content(path, params=[*ids, ("format", "png")]))
    if as_json:
        typer.echo(json.dumps(compared, indent=2))
        return
    show_comparison(compared)
    if png is not None:
        typer.echo(f"losses: {png}")


@commands.command()
def completions(job_id: NewestModel = "", url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show how a job's model completes held-out prompts, before and after training and at evaluations."""
    from app.cli.tables import show_completions

    with Client(url) as client:
        job_id = job_id or newest_with_model(client)
        found = client.get(f"{ROOT}/{job_id}/completions")
        objective = (
            "" if found["data"] else client.get(f"{ROOT}/{job_id}")["training_config"].get("objective")
        )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show_completions(job_id, found["data"], predicts_tokens=objective not in OF_SEQUENCES)


@commands.command()
def download(
    job_id: NewestModel = "",
    folder: Annotated[
        Path | None,
        typer.Argument(help="Target folder; default: ./ftjob-…, the job's id", show_default=False),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Download a trained model into a folder that does not exist yet."""
    from app.cli.download import fetch_model

    with Client(url) as client:
        job_id = job_id or newest_with_model(client)
        target = folder or Path(job_id)
        files = fetch_model(client, job_id, target)
    typer.echo(f"{target}: {', '.join(sorted(files))}")


def _act(job_id: str, what: str, url: str, as_json: bool) -> None:
    with Client(url) as client:
        job = client.post(f"{ROOT}/{job_id}/{what}", None)
    if as_json:
        typer.echo(json.dumps(job, indent=2))
    else:
        soon = {"cancel": " and will be cancelled", "pause": " and will be paused",
                "stop": " and will be stopped; its model is kept"}  # fmt: skip
        typer.echo(f"{job['id']} is {job['status']}{soon.get(job['requested'], '')}")


def _events(client: Client, job_id: str) -> list[dict[str, Any]]:
    """All events of a job, oldest first."""
    events: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        page = client.get(
            f"{ROOT}/{job_id}/events", params=without_none({"limit": 100, "after": page["last_id"]})
        )
        events += page["data"]
    return events[::-1]


def _newest(client: Client) -> str:
    data = client.get(ROOT, params={"limit": 1})["data"]
    if not data:
        raise NotFound("there is no job yet: accrue submit FILE")
    return str(data[0]["id"])


def newest_with_model(client: Client) -> str:
    """The newest job that has a model; tuning jobs have none."""
    for job in client.get(ROOT, params={"limit": 100, "status": "succeeded"})["data"]:
        if job["links"]["model"] is not None:
            return str(job["id"])
    raise NotFound("there is no trained model yet: accrue submit FILE --watch")
