"""Imports fine-tuning jobs of an OpenAI account: their files and hyperparameters, to run them here."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.cli.client import Client, ServiceError, printable
from app.cli.options import DEFAULT_URL, AsJson, Url, without_none
from app.errors import InvalidRequest

commands = typer.Typer()

_IMPORTED_FROM = "imported_from"
"""The key of the metadata that holds the id of the job in the OpenAI account."""

_AUTO = "auto"


@commands.command("import")
def import_jobs(
    source: Annotated[Literal["openai"], typer.Argument(help="Where the jobs are: openai")],
    model: Annotated[str, typer.Option(help="Base model to train instead of OpenAI's")] = "accrue/tiny-gpt2",
    job: Annotated[
        list[str] | None,
        typer.Option(
            help="A job of the account, ftjob-…; may be repeated. Without it: the newest", show_default=False
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="How many of the newest jobs to look at, also those imported before"
        ),
    ] = 20,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create the jobs paused: accrue resume starts one")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="List the jobs without importing anything")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Import supervised fine-tuning jobs of an OpenAI account, with their files and hyperparameters.

    The account is that of OPENAI_API_KEY (and OPENAI_BASE_URL). Jobs that were imported before are left out.
    """
    account = _account()
    with Client(url) as client:
        found = [
            _import(account, client, each, model, paused, dry_run) for each in _jobs(account, job, limit)
        ]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found)
    sys.exit(1 if any(each["error"] for each in found) else 0)


def _account() -> Any:
    """OpenAI's client.

    Raises:
        InvalidRequest: the package is not installed, or there is no key.
    """
    try:
        import openai
    except ImportError:
        raise InvalidRequest("accrue import needs the package openai: pip install openai") from None
    try:
        return openai.OpenAI()
    except openai.OpenAIError as error:
        raise InvalidRequest(f"OpenAI's client cannot be used: {str(error).splitlines()[0]}") from None


def _jobs(account: Any, named: list[str] | None, limit: int) -> Iterator[Any]:
    import openai

    try:
        if named:
            yield from (account.fine_tuning.jobs.retrieve(name) for name in named)
        else:
            yield from islice(account.fine_tuning.jobs.list(limit=min(limit, 100)), limit)
    except openai.OpenAIError as error:
        raise ServiceError(f"OpenAI: {printable(str(error))}") from None


def _import(
    account: Any, client: Client, job: Any, model: str, paused: bool, dry_run: bool
) -> dict[str, Any]:
    """Imports a job. Returns its id in the account, the id of the new job, and why there is none."""
    found = {"openai": printable(job.id), "model": printable(job.model), "training_id": None, "error": None}
    earlier = client.get("/v1/fine_tuning/jobs", params={f"metadata[{_IMPORTED_FROM}]": job.id})["data"]
    if earlier:
        return {**found, "training_id": earlier[0]["id"], "state": "imported before"}
    kind = job.method.type if job.method is not None else "supervised"
    if kind != "supervised":
        return {
            **found,
            "state": "left out",
            "error": f"its method is {kind}: only supervised jobs can run here",
        }
    if dry_run:
        return {**found, "state": "would be imported"}
    try:
        body = _request(job, model, lambda file_id: _file(account, client, file_id))
        made = client.post("/v1/fine_tuning/jobs", {**body, "accumulation": {"auto_start": not paused}})
    except (_Unavailable, ServiceError) as error:
        return {**found, "state": "not imported", "error": str(error)}
    return {**found, "state": "imported", "training_id": made["id"]}


class _Unavailable(Exception):
    """A file that the account does not have any more."""


def _request(job: Any, model: str, file: Any) -> dict[str, Any]:
    """The job as a request to this service."""
    given = job.method.supervised if job.method is not None else None
    hyperparameters = (given.hyperparameters if given is not None else None) or job.hyperparameters
    chosen = {
        name: getattr(hyperparameters, name, None)
        for name in ("n_epochs", "batch_size", "learning_rate_multiplier")
    }
    own = {name: value for name, value in chosen.items() if value not in (None, _AUTO)}
    metadata = {**(job.metadata or {}), _IMPORTED_FROM: job.id}
    return without_none(
        {
            "model": model,
            "training_file": file(job.training_file),
            "validation_file": file(job.validation_file) if job.validation_file else None,
            "method": {"type": "supervised", "supervised": {"hyperparameters": own}},
            "seed": job.seed,
            "suffix": getattr(job, "user_provided_suffix", None) or _suffix(job.fine_tuned_model),
            "metadata": metadata,
        }
    )


def _suffix(fine_tuned_model: str | None) -> str | None:
    """The suffix in the name of a model, such as ft:gpt-4o-mini:org:suffix:id; None without one."""
    parts = (fine_tuned_model or "").split(":")
    return parts[3] if len(parts) > 4 and parts[3] else None


def _file(account: Any, client: Client, file_id: str) -> str:
    """The id of a file of the account after its upload here; a file that is here already is used.

    Raises:
        _Unavailable: the account does not have it any more.
    """
    import openai

    with tempfile.TemporaryDirectory() as folder:
        try:
            name = Path(account.files.retrieve(file_id).filename).name
            path = Path(folder) / (name if Path(name).suffix == ".jsonl" else f"{name or file_id}.jsonl")
            with account.files.with_streaming_response.content(file_id) as content:
                content.stream_to_file(path)
        except openai.OpenAIError as error:
            raise _Unavailable(f"its file {file_id} cannot be downloaded: {printable(str(error))}") from None
        stored: Mapping[str, Any] = client.find_uploaded(path) or client.upload(path)
    return str(stored["id"])


def _show(found: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    from app.cli.terminal import console

    if not found:
        console.print("The account has no fine-tuning jobs.")
        return
    table = Table(Column("OpenAI's job", no_wrap=True), "model", "", Column("job", no_wrap=True), box=None)
    for each in found:
        table.add_row(each["openai"], each["model"], each["state"], each["training_id"] or "–")
    console.print(table)
    for each in found:
        if each["error"]:
            console.print(f"{each['openai']}: {each['error']}", style="yellow", highlight=False, markup=False)
