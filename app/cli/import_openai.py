"""Imports fine-tuning jobs of an OpenAI account: their files and hyperparameters, to run them here."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.cli.client import Client, ServiceError, printable
from app.cli.options import DEFAULT_URL, AsJson, Url, without_none
from app.contract.architecture import BUILT_IN_MODEL
from app.errors import InvalidRequest

commands = typer.Typer()

_IMPORTED_FROM = "imported_from"
"""The key of the metadata that holds the id of the job in the OpenAI account."""

_AUTO = "auto"
_BEFORE = "imported before"
_PAGE = 100
_MAX_METADATA, _MAX_SUFFIX = 16, 64


@commands.command("import")
def import_jobs(
    source: Annotated[Literal["openai"], typer.Argument(help="Where the jobs are: openai")],
    model: Annotated[str, typer.Option(help="Base model to train instead of OpenAI's")] = BUILT_IN_MODEL,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB",
            help="A job of the account, ftjob-…; may be repeated. Without it: the newest jobs, up to --limit",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="The most jobs to import, newest first; those imported before do not count"
        ),
    ] = 20,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create the jobs paused: accrue resume starts one")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="List the jobs without importing anything")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Import supervised and DPO jobs of an OpenAI account, with their files and hyperparameters.

    The account is that of OPENAI_API_KEY (and OPENAI_BASE_URL). Jobs that were imported before are not
    imported again.
    """
    account = _account()
    found: list[dict[str, Any]] = []
    with Client(url) as client:
        files = _Files(account, client)
        try:
            for each in _jobs(account, job):
                found.append(_import(files, client, each, model, paused=paused, dry_run=dry_run))
                if sum(one["state"] != _BEFORE for one in found) == limit and not job:
                    break
            if not found and not as_json:
                typer.echo("The account has no fine-tuning jobs.")
        finally:  # also after an interruption: what was imported until then
            if as_json:
                typer.echo(json.dumps(found, indent=2))
            elif found:
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


def _jobs(account: Any, named: list[str] | None) -> Iterator[Any]:
    import openai

    try:
        if named:
            yield from (account.fine_tuning.jobs.retrieve(name) for name in named)
        else:
            yield from account.fine_tuning.jobs.list(limit=_PAGE)
    except openai.OpenAIError as error:
        raise ServiceError(f"OpenAI: {printable(str(error))}") from None


def _import(
    files: "_Files", client: Client, job: Any, model: str, *, paused: bool, dry_run: bool
) -> dict[str, Any]:
    """Imports a job. Returns a row of the table: the job's id and model in the account, its id here or why it
    has none, and what was done."""
    found = {"openai": printable(job.id), "model": printable(job.model), "training_id": None, "error": None}
    earlier = client.get("/v1/fine_tuning/jobs", params={f"metadata[{_IMPORTED_FROM}]": job.id})["data"]
    if earlier:
        return {**found, "training_id": earlier[0]["id"], "state": _BEFORE}
    kind = job.method.type if job.method is not None else "supervised"
    if kind not in ("supervised", "dpo"):
        why = f"its method is {printable(kind)}: only supervised and dpo jobs can run here"
        return {**found, "state": "not supported", "error": why}
    if dry_run:
        return {**found, "state": "would be imported"}
    try:
        body = _request(job, model, files)
        made = client.post("/v1/fine_tuning/jobs", {**body, "accumulation": {"auto_start": not paused}})
    except (_Unavailable, ServiceError) as error:
        files.forget_new()
        return {**found, "state": "not imported", "error": str(error)}
    files.keep_new()
    return {**found, "state": "imported", "training_id": made["id"]}


class _Unavailable(Exception):
    """A file that the account does not have any more."""


def _request(job: Any, model: str, files: "_Files") -> dict[str, Any]:
    """The job as a request to this service.

    Raises:
        _Unavailable: the account does not have one of its files any more.
    """
    kind = job.method.type if job.method is not None else "supervised"
    given = getattr(job.method, kind, None)
    hyperparameters = (given.hyperparameters if given is not None else None) or job.hyperparameters
    chosen = {
        name: getattr(hyperparameters, name, None)
        for name in ("n_epochs", "batch_size", "learning_rate_multiplier", "beta")
    }
    own = {name: value for name, value in chosen.items() if value not in (None, _AUTO)}
    theirs = list((job.metadata or {}).items())[: _MAX_METADATA - 1]
    metadata = {**dict(theirs), _IMPORTED_FROM: job.id}
    return without_none(
        {
            "model": model,
            "training_file": files.stored(job.training_file),
            "validation_file": files.stored(job.validation_file) if job.validation_file else None,
            "method": {"type": kind, kind: {"hyperparameters": own}},
            "seed": job.seed,
            "suffix": _suffix(job),
            "metadata": metadata,
        }
    )


def _suffix(job: Any) -> str | None:
    """The job's suffix, in the characters that are allowed here; None without one. It is part of the name of
    its model, such as ft:gpt-4o-mini:org:suffix:id."""
    parts = (job.fine_tuned_model or "").split(":")
    given = parts[3] if len(parts) > 4 else getattr(job, "user_provided_suffix", None)
    allowed = re.sub(r"[^A-Za-z0-9._-]+", "-", given or "").strip("._-")
    return allowed[:_MAX_SUFFIX] or None


class _Files:
    """Files of an account, each downloaded and uploaded here once; a file that is here already is used."""

    def __init__(self, account: Any, client: Client) -> None:
        self._account, self._client = account, client
        self._stored: dict[str, str] = {}
        self._new: dict[str, str] = {}
        """Those that were uploaded for the job that is being imported."""

    def stored(self, file_id: str) -> str:
        """The id of the file here.

        Raises:
            _Unavailable: the account does not have it any more, or it cannot be downloaded.
        """
        if file_id not in self._stored:
            with tempfile.TemporaryDirectory() as folder:
                path = self._downloaded(file_id, Path(folder))
                known = self._client.find_uploaded(path)
                self._stored[file_id] = str((known or self._client.upload(path))["id"])
            if known is None:
                self._new[file_id] = self._stored[file_id]
        return self._stored[file_id]

    def keep_new(self) -> None:
        """Keeps what was uploaded: a job uses it now."""
        self._new.clear()

    def forget_new(self) -> None:
        """Deletes what was uploaded for a job that was refused."""
        for file_id, own in self._new.items():
            del self._stored[file_id]
            with suppress(ServiceError):
                self._client.delete(f"/v1/files/{own}")
        self._new.clear()

    def _downloaded(self, file_id: str, folder: Path) -> Path:
        try:
            name = Path(self._account.files.retrieve(file_id).filename).name
            path = folder / (name if Path(name).suffix == ".jsonl" else f"{name or file_id}.jsonl")
            with self._account.files.with_streaming_response.content(file_id) as content:
                content.stream_to_file(path)
        except Exception as error:  # of the client, of its HTTP library, or of this machine's disk
            why = printable(str(error)).strip().splitlines()
            raise _Unavailable(
                f"its file {file_id} cannot be downloaded: {why[0] if why else type(error).__name__}"
            ) from None
        return path


def _show(found: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    from app.cli.terminal import console

    table = Table(Column("OpenAI's job", no_wrap=True), "model", "", Column("job", no_wrap=True), box=None)
    for each in found:
        table.add_row(each["openai"], each["model"], each["state"], each["training_id"] or "–")
    console.print(table)
    for each in found:
        if each["error"]:
            console.print(f"{each['openai']}: {each['error']}", style="yellow", highlight=False, markup=False)
