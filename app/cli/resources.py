"""Commands for models, files and devices."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.client import Client
from app.cli.options import DEFAULT_URL, AsJson, Columns, SampleBy, Url, columns_of, without_none

commands = typer.Typer()
models = typer.Typer(invoke_without_command=True)
files = typer.Typer(invoke_without_command=True)
commands.add_typer(models, name="models")
commands.add_typer(files, name="files")

FileToAdd = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines, JSON, CSV, Parquet or text")
]


@models.callback()
def list_models(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List trained models, and the base models for which Accrue can plan without contacting the hub."""
    if context.invoked_subcommand is not None:
        return
    from app.cli.tables import show_models

    with Client(url) as client:
        trained = [model for model in client.get("/v1/models")["data"] if model["owned_by"] == "accrue"]
        known = client.get("/gradient-accumulation/models")["data"]
    if as_json:
        typer.echo(json.dumps({"trained": trained, "base": known}, indent=2))
    else:
        show_models(trained, known)


@models.command("delete")
def delete_model(
    name: Annotated[str, typer.Argument(help="As accrue models lists it", show_default=False)],
    url: Url = DEFAULT_URL,
) -> None:
    """Delete a trained model's files; its job stays, with its metrics."""
    with Client(url) as client:
        client.delete(f"/v1/models/{name}")
    typer.echo(f"{name} is deleted")


@files.callback()
def list_files(context: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List training files, or add or delete one."""
    if context.invoked_subcommand is not None:
        return
    from app.cli.tables import show_files

    with Client(url) as client:
        page: dict[str, Any] = client.get("/v1/files", params={"limit": 100})
    if as_json:
        typer.echo(json.dumps(page, indent=2))
    else:
        show_files(page["data"])


@files.command("add")
def add_file(
    file: FileToAdd,
    column: Columns = None,
    sample_by: SampleBy = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Upload a file, and print its id."""
    with Client(url) as client:
        stored = client.upload(file, columns_of(column), sample_by)
    typer.echo(json.dumps(stored, indent=2) if as_json else stored["id"])


@files.command("delete")
def delete_file(
    file_id: Annotated[str, typer.Argument(help="file-…", show_default=False)], url: Url = DEFAULT_URL
) -> None:
    """Delete a file that no job needs."""
    with Client(url) as client:
        client.delete(f"/v1/files/{file_id}")
    typer.echo(f"{file_id} is deleted")


@commands.command()
def gpus(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the GPUs of the service's machine, and the workers with their devices and jobs."""
    from app.cli.tables import show_gpus

    with Client(url) as client:
        seen = client.get("/gradient-accumulation/gpus")
        workers = client.get("/gradient-accumulation/workers")["data"]
    if as_json:
        typer.echo(json.dumps({**seen, "workers": workers}, indent=2))
    else:
        show_gpus(seen, workers)


@commands.command()
def usage(
    first: Annotated[
        str | None, typer.Option(help="First day, such as 2026-11-01; default: the first of this month")
    ] = None,
    last: Annotated[str | None, typer.Option(help="Last day; default: today (UTC)")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show device hours by key and day, and quotas; without the scope admin, only your own."""
    from app.cli.tables import show_usage

    asked = without_none({"first": first, "last": last})
    path = "/gradient-accumulation/usage"
    with Client(url) as client:
        if as_csv:
            typer.echo(client.content(path, params=[*asked.items(), ("format", "csv")]).decode(), nl=False)
            return
        found = client.get(path, params=asked)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    show_usage(found)
