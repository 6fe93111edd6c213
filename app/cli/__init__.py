"""The accrue command."""
# ruff: noqa: E402

import gc

gc.disable()  # loading modules creates no garbage to collect

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app import __version__
from app.cli import benchmark, chat, exports, import_openai, jobs, keys, resources, service, submit, sweeps
from app.cli.client import ServiceError, printable
from app.errors import AccrueError

gc.freeze()  # later collections skip what was loaded, which would take 30 ms
gc.enable()

app = typer.Typer(
    name="accrue",
    help="Fine-tuning at the effective batch you want, on the GPU you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (submit, sweeps, import_openai, jobs, chat, exports, resources, benchmark, service):
    app.add_typer(part.commands)
app.add_typer(keys.commands, name="keys")
errors = Console(stderr=True)


def main() -> None:
    """Runs the command; an error is one line on standard error, and exit status 1. This also holds for
    unexpected errors, since another program may be answering at the service's address."""
    try:
        app(standalone_mode=True)
    except (AccrueError, ServiceError) as error:
        errors.print(f"accrue: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if os.environ.get("ACCRUE_LOG_LEVEL", "").upper() == "DEBUG":
            raise
        if isinstance(error, OSError) and error.filename is not None:
            what = str(printable(f"{error.filename}: {error.strerror}"))
            errors.print(f"accrue: {what}", style="red", markup=False, highlight=False, soft_wrap=True)
            sys.exit(1)
        what = str(printable(f"{type(error).__name__}: {error}")).splitlines()[0]
        hint = "ACCRUE_LOG_LEVEL=debug shows where the error occurred."
        if isinstance(error, (LookupError, TypeError, AttributeError, RecursionError)):
            hint = f"Is the address (--url or ACCRUE_URL) that of an Accrue service of this version? {hint}"
        errors.print(
            f"accrue: unexpected error ({what}). {hint}",
            style="red", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        sys.exit(1)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"accrue {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit"),
    ] = False,
) -> None:
    """Fine-tuning at the effective batch you want, on the GPU you have."""


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option(help="New folder for the demo's files; an earlier demo's is replaced")
    ] = Path("demo-data"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps")] = 200,
) -> None:
    """Train a small model end to end, over HTTP, on the docstrings of Python's standard library."""
    from app.cli.demo import run

    sys.exit(run(folder, steps))
