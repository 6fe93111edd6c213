"""Commands for sweeps: jobs that differ in a few fields."""

import json
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from app.cli.client import Client
from app.cli.options import DEFAULT_URL, AsJson, Columns, Url, columns_of
from app.cli.submit import Batch, DataFile, MaxLength, Model, Settings, submit_file
from app.contract.architecture import BUILT_IN_MODEL

commands = typer.Typer()

ROOT = "/gradient-accumulation/sweeps"

_ENDED = ("succeeded", "failed", "cancelled")
_POLL_SECONDS = 1.0

_DECIDE_VALIDATION = ("dataset_config.validation_", "dataset_config=")
"""Beginnings of --set with which the default share of held-out samples does not apply."""


@commands.command()
def sweep(
    file: DataFile,
    vary: Annotated[
        list[str],
        typer.Option(
            help="A field and its values, as in learning_rate=1e-5,1e-4; may be repeated, for every "
            "combination. Fields: learning_rate, effective_batch_size, lora_rank, or any other as in --set",
            metavar="FIELD=VALUE,VALUE",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the sweep; generated if omitted")] = None,
    model: Model = BUILT_IN_MODEL,
    batch: Batch = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default 3")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs")] = None,
    max_length: MaxLength = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora")] = None,
    validation_split: Annotated[
        float | None,
        typer.Option(
            "--validation-split",
            help="Share of the samples on which the jobs are compared; 0: none. Default: 0.1, unless "
            "--set dataset_config.validation_file_id names a file",
            show_default=False,
        ),
    ] = None,
    column: Columns = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option(help="Check and plan the jobs without queueing them")] = False,
    watch: Annotated[bool, typer.Option("--watch/--no-watch", help="Wait until all jobs have ended")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Train on data once for each combination of values, and find the best.

    The best job is the one with the lowest validation loss, or training loss if there is no validation data.
    """
    if validation_split is None and not any(each.startswith(_DECIDE_VALIDATION) for each in settings or ()):
        validation_split = 0.1
    dataset = {"max_length": max_length, "validation_split": validation_split or None}
    training = {"epochs": epochs, "max_steps": max_steps, "method": method}
    more = {"name": name, "vary": dict(map(_values, vary)), "dry_run": dry_run}
    if len(more["vary"]) < len(vary):  # type: ignore[arg-type]
        raise typer.BadParameter("a field is given twice", param_hint="--vary")
    with Client(url) as client:
        found = submit_file(
            client, file, model, batch, dataset, training, more, settings, columns_of(column), ROOT
        )
        if watch and not dry_run:
            from app.cli.terminal import INTERRUPTED, notify

            _announce(found)
            try:
                found = _wait(client, found, quiet=as_json)
            except KeyboardInterrupt:
                notify(f"The jobs continue: accrue sweeps {found['name']} shows them")
                sys.exit(INTERRUPTED)
    _show(found, as_json=as_json)
    if watch and not dry_run:
        sys.exit(0 if all(job["status"] == "succeeded" for job in found["jobs"]) else 1)


@commands.command()
def sweeps(
    name: Annotated[str | None, typer.Argument(help="A sweep; lists all of them if omitted")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a sweep's jobs and the best of them, or list sweeps."""
    from app.cli.tables import show_sweeps

    with Client(url) as client:
        found = client.get(ROOT if name is None else f"{ROOT}/{name}")
    if name is None and not as_json:
        show_sweeps(found["data"])
    else:
        _show(found, as_json=as_json)


def _values(given: str) -> tuple[str, list[Any]]:
    """A field and its values. A value is JSON, or else the text up to the next comma.

    >>> _values("learning_rate=1e-5,1e-4")
    ('learning_rate', [1e-05, 0.0001])
    >>> _values("training_config.optimizer=adamw,lion")
    ('training_config.optimizer', ['adamw', 'lion'])
    >>> _values('training_config.method=full,{"lora": {"r": 4, "alpha": 8}}')
    ('training_config.method', ['full', {'lora': {'r': 4, 'alpha': 8}}])
    """
    field, equals, text = given.partition("=")
    if not (field and equals and text):
        raise typer.BadParameter(f"{given!r} is not FIELD=VALUE,VALUE", param_hint="--vary")
    values, rest = [], f"{text},"
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
            if rest[end] != ",":  # it only begins like JSON
                raise ValueError
        except ValueError:
            end = rest.index(",")
            value = rest[:end]
        values.append(value)
        rest = rest[end + 1 :].lstrip()
    return field, values


def _announce(sweep: dict[str, Any]) -> None:
    """Names a new sweep and its jobs on standard error, so that they are known if the command is ended."""
    from app.cli.terminal import notify

    ids = ", ".join(job["training_id"] for job in sweep["jobs"])
    notify(f"{sweep['name']}: {len(sweep['jobs'])} jobs ({ids})")


def _wait(client: Client, sweep: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Waits until all jobs of a sweep have ended. Returns the sweep."""
    from app.cli.terminal import console, notify

    total, reported = len(sweep["jobs"]), 0
    with console.status(f"{sweep['name']}: {total} jobs") if not quiet else nullcontext() as status:
        while True:
            sweep = client.get_patiently(f"{ROOT}/{sweep['name']}", notify)
            ended = sum(job["status"] in _ENDED for job in sweep["jobs"])
            if ended > reported and not console.is_terminal:  # which shows no status
                notify(f"{sweep['name']}: {ended} of {total} jobs have ended")
                reported = ended
            if ended == len(sweep["jobs"]):
                return sweep
            if status is not None:
                steps = [job for job in sweep["jobs"] if job["status"] == "running"]
                doing = "; ".join(f"step {job['step']} of {job['steps_total']}" for job in steps)
                status.update(f"{sweep['name']}: {ended} of {total} jobs have ended; {doing or 'waiting'}")
            time.sleep(_POLL_SECONDS)


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    from app.cli.tables import show_sweep, show_sweep_plan

    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif found["object"] == "sweep":
        show_sweep(found)
    else:
        show_sweep_plan(found)
