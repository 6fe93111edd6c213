"""accrue export: a trained model in a form for other tools, compared with the original."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.client import Client, ServiceError
from app.cli.download import fetch_tar
from app.cli.jobs import newest_with_model
from app.cli.options import DEFAULT_URL, AsJson, NewestModel, Url, without_none
from app.errors import InvalidRequest

commands = typer.Typer()

_LOOK_SECONDS = 0.5


@commands.command()
def export(
    job_id: NewestModel = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Target folder; default: ./export-…, the export's id", show_default=False
        ),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="merged (a whole model), adapter (LoRA alone) or gguf")
    ] = "merged",
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Type of the weights: fp32, bf16, fp16, or for gguf q8_0; default: the type of the "
            "trained model if it was saved whole, and otherwise the type in which its base model is stored",
            show_default=False,
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            help="Upload the files to this repository of the Hugging Face Hub (HF_TOKEN, HF_ENDPOINT)",
            metavar="OWNER/NAME",
            show_default=False,
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create that repository as a public one")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Export a trained model for vLLM, Ollama, llama.cpp or transformers.

    A worker makes the export, loads it as its users will, and compares its predictions on held-out samples
    (on training samples if none are held out) with those of the trained model. The files are then downloaded
    into a folder that does not exist yet.
    """
    with Client(url) as client:
        job_id = job_id or newest_with_model(client)
        path = f"/gradient-accumulation/training/{job_id}/exports"
        made = client.post(path, without_none({"format": format_, "type": type_}))
        target = output or Path(made["id"])
        if target.exists():
            client.delete(f"{path}/{made['id']}")
            raise InvalidRequest(f"{target} already exists: set --output to a folder that does not exist yet")
        made = _finished(client, f"{path}/{made['id']}", quiet=as_json)
        fetch_tar(client, str(made["download"]), target, quiet=as_json)
        client.delete(f"{path}/{made['id']}")  # the service needs to keep no second copy
    made = {**made, "folder": str(target), "pushed_to": None}
    if push is not None:
        made["pushed_to"] = _pushed(target, push, private=not public)
    if as_json:
        typer.echo(json.dumps(made, indent=2))
    else:
        _show(made, target)


def _finished(client: Client, path: str, *, quiet: bool) -> Any:
    """The export once it has ended; it is deleted if the user stops waiting.

    Raises:
        ServiceError: it failed.
    """
    from app.cli.progress import waiting

    try:
        with waiting("exporting, and comparing with the trained model", quiet=quiet):
            while (export := client.get(path))["status"] in ("queued", "running"):
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        client.delete(path)
        raise
    if export["status"] == "failed":
        client.delete(path)
        raise ServiceError(f"not exported: {export['error']}")
    return export


def _pushed(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads a folder to the hub. Returns the address.

    Raises:
        ServiceError: the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Export by Accrue")
    except Exception as error:  # of the hub's client, or of the library by which it connects
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ServiceError(
            f"the files are in {folder}, but were not pushed to {repository}: {why[0]}"
        ) from None
    return str(address)


def _show(made: dict[str, Any], target: Path) -> None:
    checked = made["verification"]
    where = "held-out samples" if checked["held_out"] else "samples of the training data (none were held out)"
    near = f", {checked['near_ties']:.2%} more are near ties" if checked["near_ties"] else ""
    kind = ", ".join(filter(None, [made["format"], made["type"]]))
    typer.echo(f"{target}: {made['bytes'] / 2**20:,.1f} MiB, {kind}")
    typer.echo(
        f"compared with the trained model: the same in {checked['agreement']:.2%} of "
        f"{checked['tokens']:,} predictions on {checked['samples']} {where}{near}"
    )
    for note in made["notes"]:
        typer.echo(note)
    if made["pushed_to"]:
        typer.echo(f"pushed to {made['pushed_to']}")
    commands = made["commands"]
    servers = [each for each in (commands["vllm"], commands["ollama"]) if each]
    for command in servers or [commands["transformers"]]:
        typer.echo(f"  {command.replace('DIR', str(target))}")
