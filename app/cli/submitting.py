"""Commands that plan a job, and that ask for one."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.options import DEFAULT_URL, AsJson, Url, given
from app.client import Client
from app.errors import InvalidRequest

commands = typer.Typer()

DataFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file, or a text file")]
Model = Annotated[str, typer.Option(help="Base model")]
Batch = Annotated[int | None, typer.Option(help="Effective batch: samples per optimizer step")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a sample")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other field of the request, as in training_config.method=lora or "
        "dataset_config.packing=true; may be given several times",
    ),
]


@commands.command()
def submit(
    file: DataFile,
    model: Model = "accrue/tiny-gpt2",
    batch: Batch = None,
    steps: Annotated[int | None, typer.Option(help="Accumulation steps; left out, they are planned")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default 3")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs")] = None,
    learning_rate: Annotated[float, typer.Option("--lr", min=0, max=100, help="Peak learning rate")] = 5e-5,
    max_length: MaxLength = None,
    settings: Settings = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure micro-batches first, and take the leanest of the fastest")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Check and plan, queue nothing")] = False,
    watch_it: Annotated[bool, typer.Option("--watch/--no-watch", help="Follow the job to its end")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Upload data and train on it.

    A file that does not end in .jsonl is one text, split into samples of max_length tokens.
    """
    from app.terminal import follow, show_plan

    training = {"epochs": epochs, "max_steps": max_steps, "learning_rate": learning_rate}
    more = {"accumulation_steps": steps, "dry_run": dry_run, "tune": "first" if tune else None}
    with Client(url) as client:
        job = _submit(client, file, model, batch, max_length, training, more, settings)
        if as_json:
            typer.echo(json.dumps(job, indent=2))
        else:
            if not dry_run:
                typer.echo(job["id"])
            show_plan(job)
        if watch_it and not dry_run:
            sys.exit(follow(client, job["id"]))


@commands.command()
def tune(
    file: DataFile,
    model: Model = "accrue/tiny-gpt2",
    batch: Batch = None,
    max_length: MaxLength = None,
    settings: Settings = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Measure on the device which micro-batch is fastest, with your data; no model comes of it.

    It is a job as any other: it waits for a free device. What it finds is what later plans for this model,
    method and length on such a device go by.
    """
    from app.terminal import show_tuning, wait_for

    with Client(url) as client:
        job = _submit(client, file, model, batch, max_length, {}, {"tune": "only"}, settings)
        job = wait_for(client, job["id"], "measuring", quiet=as_json)
    if as_json:
        typer.echo(json.dumps(job["result"] and job["result"]["tuning"], indent=2))
        sys.exit(0 if job["status"] == "succeeded" else 1)
    sys.exit(show_tuning(job))


@commands.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model's name: gpt2, accrue/tiny-gpt2, or a local one")],
    batch: Annotated[int | None, typer.Option(help="Effective batch wanted")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="A device to plan for: 24GB, A100-80GB; repeatable")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a sample")] = None,
    method: Annotated[str, typer.Option(help="full, lora or qlora")] = "full",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw_8bit, lion, lamb, lars, sgd, adafactor")
    ] = "adamw",
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, no, tf32 or pure_bf16")] = None,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing")] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=30, help="Seconds to wait for a simulation; then it is by formula")
    ] = 10.0,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits, and in which micro-batches and steps."""
    from app.terminal import show_batch_size

    body = {
        "model_name": model,
        "target_effective_batch_size": batch,
        "gpus": gpu or None,
        "max_length": max_length,
        "method": method,
        "optimizer": optimizer,
        "mixed_precision": precision,
        "gradient_checkpointing": checkpointing,
        "wait_seconds": wait,
    }
    with Client(url) as client:
        answer = client.post("/gradient-accumulation/calculate-batch-size", given(body))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        show_batch_size(answer)
    if not answer["fits"]:
        sys.exit(2)


def _submit(
    client: Client,
    file: Path,
    model: str,
    batch: int | None,
    max_length: int | None,
    training: dict[str, Any],
    more: dict[str, Any],
    settings: list[str] | None,
) -> Any:
    """Uploads the file and asks for a job on it; gives the service's answer."""
    dataset: dict[str, Any] = {"max_length": max_length}
    if file.suffix.lower() == ".jsonl":
        dataset["file_id"] = client.upload(file)["id"]
    else:
        dataset |= {"texts": [_text(file)], "overlength": "split"}
    body = {
        "model_name": model,
        "dataset_config": given(dataset),
        "training_config": given(training),
        "target_effective_batch_size": batch,
        **more,
    }
    body = given(body)
    for assignment in settings or []:
        _set(body, assignment)
    return client.post("/gradient-accumulation/training/with-accumulation", body)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{file} is not UTF-8 text: submit a text file, or JSON lines as .jsonl"
        ) from None


def _set(body: dict[str, Any], assignment: str) -> None:
    """Sets `field=value` or `group.field=value`; the value is JSON, or else the text as it stands."""
    path, equals, text = assignment.partition("=")
    *groups, name = path.split(".")
    if not equals or not name:
        raise typer.BadParameter(f"{assignment!r} is not FIELD=VALUE", param_hint="--set")
    for group in groups:
        body = body.setdefault(group, {})
    try:
        body[name] = json.loads(text)
    except ValueError:
        body[name] = text
