"""Commands that plan and submit jobs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.cli.client import Client, ServiceError
from app.cli.options import DEFAULT_URL, AsJson, Columns, Url, columns_of, named_values, without_none
from app.contract.architecture import BUILT_IN_MODEL
from app.datasets.file_types import SUFFIXES
from app.errors import InvalidRequest

commands = typer.Typer()

DataFile = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, help="JSON lines, JSON, CSV, Parquet, or a text file"),
]
Model = Annotated[
    str,
    typer.Option(
        help="Base model: owner/name on the Hugging Face Hub, a local model, or a trained one. The default "
        "is a tiny model with one token per byte, for trying things out"
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Effective batch: samples per optimizer step over all devices; default: by the number of samples"
    ),
]
MaxLength = Annotated[int | None, typer.Option(help="Maximum tokens per sample")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any other field of the request, as in training_config.method=lora or "
        "dataset_config.packing=true; may be given several times",
    ),
]


@commands.command()
def submit(
    file: DataFile,
    model: Model = BUILT_IN_MODEL,
    batch: Batch = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--accumulation-steps",
            help="Micro-batches per step and device; planned if omitted. Without --batch, they decide the "
            "effective batch: steps x 8 x devices",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; default 3")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--lr",
            help="Peak learning rate. Default with full: 5e-5 (sft, classification), 1e-6 (dpo, orpo, simpo, "
            "kto) or 1e-5 (reward); with lora and qlora, in the same order: 2e-4, 1e-5 or 1e-4",
        ),
    ] = None,
    max_length: MaxLength = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="full, lora or qlora; for a method's options: --set training_config.method.lora.r=32"
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="sft; dpo, orpo, simpo or reward for pairs of answers; kto for labelled answers; "
            "classification for labelled texts; default: from the data; for its arguments: "
            "--set training_config.objective_args.beta=0.2"
        ),
    ] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing", help="Gradient checkpointing", show_default=False)
    ] = None,
    validation_split: Annotated[
        float | None,
        typer.Option("--validation-split", help="Share of the samples to evaluate on, such as 0.1"),
    ] = None,
    num_gpus: Annotated[
        str | None,
        typer.Option(help="Number of devices (of one worker), or auto; default: 1", metavar="NUMBER"),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="A label that the job's worker must have, such as zone=a; may be repeated",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            help="A note on the job that lists can be filtered by, such as project=support; may be repeated",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    column: Columns = None,
    settings: Settings = None,
    tune: Annotated[
        bool | None,
        typer.Option(
            "--tune/--no-tune",
            help="--tune: after two steps, pause to measure several micro-batch sizes (in the API, tune is "
            "then first); --no-tune: use the planned size. Default: try other sizes during normal steps, in "
            "jobs of at least 102 steps on one device whose request leaves the size open (docs/planning.md)",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Check and plan the job without queueing it")] = False,
    watch_it: Annotated[bool, typer.Option("--watch/--no-watch", help="Follow the job to its end")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Upload data and train on it.

    Files that end in .jsonl, .ndjson, .json, .csv, .tsv or .parquet hold samples. Any other file is one text,
    split into samples of max_length tokens.
    """
    from app.cli.terminal import follow, show_plan

    dataset = {"max_length": max_length, "validation_split": validation_split}
    training = {
        "epochs": epochs, "max_steps": max_steps, "learning_rate": learning_rate, "method": method,
        "objective": objective, "gradient_checkpointing": checkpointing,
    }  # fmt: skip
    more = {
        "accumulation_steps": steps, "num_gpus": _devices(num_gpus), "dry_run": dry_run,
        "tune": {True: "first", False: "off", None: None}[tune],
        "requirements": named_values(require, "--require"),
        "metadata": named_values(metadata, "--metadata"),
    }  # fmt: skip
    with Client(url) as client:
        job = submit_file(client, file, model, batch, dataset, training, more, settings, columns_of(column))
        if as_json:
            typer.echo(json.dumps(job, indent=2))
        else:
            if not dry_run:
                typer.echo(job["id"])
            show_plan(job)
        if watch_it and not dry_run:
            sys.exit(follow(client, job["id"]))


def _devices(given: str | None) -> int | str | None:
    if given is None or given == "auto":
        return given
    if not given.isdecimal():
        raise typer.BadParameter(f"{given!r} is neither a number nor auto", param_hint="--num-gpus")
    return int(given)


@commands.command()
def tune(
    file: DataFile,
    model: Model = BUILT_IN_MODEL,
    batch: Batch = None,
    max_length: MaxLength = None,
    column: Columns = None,
    settings: Settings = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Measure on a worker's device which micro-batch size is fastest with your data; makes no model.

    It runs as a job, so it waits for a free device. Later plans use the result, if their model, method and
    other training options, sample length and kind of device are the same.
    """
    from app.cli.terminal import show_tuning, wait_for

    with Client(url) as client:
        dataset = {"max_length": max_length}
        job = submit_file(
            client, file, model, batch, dataset, {}, {"tune": "only"}, settings, columns_of(column)
        )
        job = wait_for(client, job["id"], "measuring", quiet=as_json)
    if as_json:
        typer.echo(json.dumps(job["result"] and job["result"]["tuning"], indent=2))
        sys.exit(0 if job["status"] == "succeeded" else 1)
    sys.exit(show_tuning(job))


@commands.command()
def preview(
    data: Annotated[str, typer.Argument(help="A data file, or the id of an uploaded one: file-…")],
    model: Model = BUILT_IN_MODEL,
    column: Columns = None,
    max_length: MaxLength = None,
    limit: Annotated[int, typer.Option(min=1, max=20, help="Samples to show")] = 3,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show data as the trainer will see it: tokens, those that count toward the loss, and lengths.

    A local file that the service does not have yet is uploaded for the preview and deleted afterwards.
    """
    from app.cli.tables import show_preview

    requested = without_none({"model_name": model, "max_length": max_length, "limit": limit})
    with Client(url) as client, _uploaded(client, data, columns_of(column)) as file_id:
        seen = client.get(f"/gradient-accumulation/datasets/{file_id}/preview", params=requested)
    if as_json:
        typer.echo(json.dumps(seen, indent=2, ensure_ascii=False))
    else:
        show_preview(seen)


@contextmanager
def _uploaded(client: Client, data: str, columns: dict[str, str] | None) -> Iterator[str]:
    """The id of an uploaded file; a local file is uploaded, and deleted when the block ends."""
    if not Path(data).is_file():
        if not data.startswith("file-"):
            raise typer.BadParameter(f"there is no file {data}", param_hint="DATA")
        yield data
        return
    if Path(data).suffix.lower() not in SUFFIXES:
        _text(Path(data))  # raises if it is no text
        raise InvalidRequest(
            f"accrue preview reads only files that end in {', '.join(SUFFIXES)}. accrue submit would train "
            f"on {data} as one plain text: rename it to .txt to preview it"
        )
    stored = None if columns else client.find_uploaded(Path(data))
    if stored is not None:
        yield stored["id"]
        return
    file_id: str = client.upload(Path(data), columns)["id"]
    try:
        yield file_id
    finally:
        client.delete(f"/v1/files/{file_id}")


@commands.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(help="gpt2, accrue/tiny-gpt2, owner/name, a local or a trained model"),
    ],
    batch: Annotated[int | None, typer.Option(help="Effective batch")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU", help="A device to plan for: 24GB, A100-80GB; repeatable"),
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=1, help="How many of the service's devices to plan for; default: all")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum tokens per sample")] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="sft, dpo, orpo, simpo, kto, classification or reward: with dpo, orpo, simpo and "
            "reward, a sample is a pair"
        ),
    ] = "sft",
    method: Annotated[str, typer.Option(help="full, lora or qlora")] = "full",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw_8bit, lion, lamb, lars, sgd, adafactor")
    ] = "adamw",
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, no (fp32), tf32 or pure_bf16")] = None,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing")] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            help="Print a configuration of another tool instead, with the same effective batch: trl, "
            "axolotl, llamafactory, torchtune, nemo (NeMo AutoModel) or kubeflow (a TrainJob that runs TRL)"
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, max=30, help="Seconds to wait for a simulation before falling back to the formula"
        ),
    ] = 10.0,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show whether a model fits, and into which micro-batches and accumulation steps a batch is divided."""
    from app.cli.terminal import show_batch_size

    if emit is not None and batch is None:
        raise typer.BadParameter("give the effective batch that the tool is to train", param_hint="--batch")
    body = {
        "model_name": model,
        "target_effective_batch_size": batch,
        "num_gpus": num_gpus,
        "gpus": gpu or None,
        "max_length": max_length,
        "objective": objective,
        "method": method,
        "optimizer": optimizer,
        "mixed_precision": precision,
        "gradient_checkpointing": checkpointing,
        "wait_seconds": wait,
    }
    with Client(url) as client:
        if emit is not None:
            made = client.post(f"/gradient-accumulation/tool-configs/{quote(emit)}", without_none(body))
            _show_config(made, as_json)
            return
        answer = client.post("/gradient-accumulation/calculate-batch-size", without_none(body))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        show_batch_size(answer)
    if not answer["fits"]:
        sys.exit(2)


def submit_file(
    client: Client,
    file: Path,
    model: str,
    batch: int | None,
    dataset: dict[str, Any],
    training: dict[str, Any],
    more: dict[str, Any],
    settings: list[str] | None,
    columns: dict[str, str] | None,
    path: str = "/gradient-accumulation/training/with-accumulation",
) -> Any:
    """Uploads the file, unless the service already has it, and submits a job, or several, with it. Returns
    the service's answer.

    Raises:
        InvalidRequest: it is not a regular file: a device such as /dev/zero may have no end.
    """
    if not file.is_file():
        raise InvalidRequest(f"{file} is not a regular file")
    uploaded = None
    if file.suffix.lower() in SUFFIXES:
        stored = None if columns else client.find_uploaded(file)
        if stored is None:
            stored = client.upload(file, columns)
            uploaded = stored["id"]
        dataset = {**dataset, "file_id": stored["id"]}
    else:
        dataset = {**dataset, "texts": [_text(file)], "overlength": "split"}
    body = {
        "model_name": model,
        "dataset_config": without_none(dataset),
        "training_config": without_none(training),
        "target_effective_batch_size": batch,
        **more,
    }
    body = without_none(body)
    by_options = _given(body)
    queued = False
    try:
        for assignment in settings or []:
            _set(body, assignment, by_options)
        answer = client.post(path, body)
        queued = not body.get("dry_run", False)
    finally:
        if uploaded is not None and not queued:  # it was uploaded for this job alone
            with suppress(ServiceError):
                client.delete(f"/v1/files/{uploaded}")
    return answer


def _show_config(made: dict[str, Any], as_json: bool) -> None:
    """Prints another tool's configuration, so that it can be redirected into a file."""
    typer.echo(json.dumps(made, indent=2) if as_json else made["content"], nl=as_json)
    for warning in made["warnings"]:
        typer.echo(f"warning: {warning}", err=True)


def _text(file: Path) -> str:
    """The text of a file.

    Raises:
        InvalidRequest: the file is not plain text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{file} is not UTF-8 text: submit a text file, JSON lines (.jsonl), JSON, CSV or Parquet"
        ) from None


def _set(body: dict[str, Any], assignment: str, by_options: dict[str, Any]) -> None:
    """Sets `field=value` or `group.field=value`; the value is JSON, or else the text as it stands.

    Args:
        by_options: what options have set, as `_given` returns it.

    Raises:
        BadParameter: the assignment has another form, or an option gives the field another value.
    """
    path, equals, text = assignment.partition("=")
    *groups, name = path.split(".")
    if not equals or not name:
        raise typer.BadParameter(f"{assignment!r} is not FIELD=VALUE", param_hint="--set")
    for depth, (group, inner) in enumerate(pairwise([*groups, name]), 1):
        if by_options.get(group) not in (None, inner) and not isinstance(by_options[group], dict):
            raise _contradiction(".".join(groups[:depth]), by_options[group], inner)
        if not isinstance(body.get(group), dict):  # "lora" becomes {"lora": …} if its options are set
            body[group] = {}
        body = body[group]
        by_options = chosen if isinstance(chosen := by_options.get(group), dict) else {}
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if not _agree(by_options.get(name), value, text):
        raise _contradiction(path, by_options[name], text)
    body[name] = value


def _given(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that options and arguments of the command line have set, without defaults."""
    given = deepcopy(body)
    if not given.get("dry_run"):
        given.pop("dry_run", None)
    if given["model_name"] == BUILT_IN_MODEL:
        del given["model_name"]
    given["dataset_config"].pop("overlength", None)
    return given


def _agree(given: Any, value: Any, text: str) -> bool:
    """Whether a field's value by --set agrees with that of an option.

    Args:
        value: what `text` means as JSON.
    """
    if given is None or given == text:
        return True
    if isinstance(given, dict):  # a whole group would replace the fields that are given
        return not given
    if isinstance(value, dict):  # a method's name, and the same method with its options
        return list(value) == [given]
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)


def _contradiction(path: str, given: object, text: str) -> typer.BadParameter:
    named = f"{path} is {str(given)[:60]}" if not isinstance(given, dict) else f"fields of {path} are given"
    return typer.BadParameter(
        f"{named} by an option or argument of this command, and {text[:60]} by --set: give it only once",
        param_hint="--set",
    )
