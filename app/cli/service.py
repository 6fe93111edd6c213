"""Commands for running the service; none of them uses HTTP."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app import PACKAGE_PREFIX

commands = typer.Typer()

AsJson = Annotated[bool, typer.Option("--json", help="Print the findings as JSON")]

_STREAMS_END_SECONDS = 2
"""How long event streams may go on after SIGTERM; their clients reconnect by themselves."""


Host = Annotated[
    str | None,
    typer.Option(help="Address to listen on; default: ACCRUE_HOST or 127.0.0.1", show_default=False),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="Port to listen on; default: ACCRUE_PORT or 8000", show_default=False
    ),
]


def _listen_on(host: str | None, port: int | None) -> None:
    """Sets the address for this process and for those that it starts."""
    given = {"ACCRUE_HOST": host, "ACCRUE_PORT": None if port is None else str(port)}
    os.environ.update({name: value for name, value in given.items() if value is not None})


def _declare_openapi_models() -> None:
    """Imports FastAPI's models of an OpenAPI document so that pydantic builds them when the document is first
    requested: building them takes 4 % of the start, and FastAPI has no option for this."""
    from pydantic import BaseModel

    BaseModel.model_config["defer_build"] = True
    try:
        import fastapi.openapi.models  # noqa: F401
    finally:
        del BaseModel.model_config["defer_build"]


@commands.command()
def up(host: Host = None, port: Port = None) -> None:
    """Run the service and a worker together; Ctrl-C ends both."""
    _listen_on(host, port)
    from app.runtime.processes import check_port
    from app.runtime.processes import up as run
    from app.settings import get_settings

    settings = get_settings()
    check_port(settings.host, settings.port)
    typer.echo(f"Starting Accrue at http://{settings.host}:{settings.port}; Ctrl-C stops it.", err=True)
    sys.exit(run())


@commands.command()
def serve(host: Host = None, port: Port = None) -> None:
    """Run the service alone."""
    _listen_on(host, port)
    gc.disable()  # loading the modules creates no garbage to collect
    _declare_openapi_models()
    import structlog
    import uvicorn

    from app.logs import configure
    from app.main import create_app
    from app.maintenance.ineffective_settings import ineffective_settings
    from app.runtime.parent import end_with_parent
    from app.runtime.processes import check_port
    from app.security.local import require_keys_off_loopback
    from app.settings import LOOPBACK, get_settings
    from app.storage.migrations import migrate
    from app.web.connections import raise_connection_limit
    from app.web.http_connections import LimitedHttpProtocol

    end_with_parent()
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    for message in ineffective_settings():
        structlog.get_logger().warning(message)
    check_port(settings.host, settings.port)
    settings.make_directories()
    app = create_app(settings)
    if settings.host not in LOOPBACK:
        migrate(settings.resolved_database_url)
        if settings.oidc_issuer is None:
            require_keys_off_loopback(settings.host, app.state.database)
    gc.enable()
    gc.freeze()
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        root_path=settings.root_path,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_STREAMS_END_SECONDS,
        http=LimitedHttpProtocol,
        ws="none",
        limit_concurrency=raise_connection_limit(),
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
    )


@commands.command()
def worker(
    until_empty: Annotated[
        bool,
        typer.Option("--until-empty", help="Exit once this worker runs no job, and none is queued for it"),
    ] = False,
) -> None:
    """Run a worker: it claims jobs and trains them.

    On SIGTERM or Ctrl-C, the trainers write a checkpoint, their jobs go back to the queue, and the worker
    exits; a second signal makes it exit at once. On SIGUSR1, the worker finishes its running jobs, claims no
    more, and exits.
    """
    import importlib

    importlib.import_module(f"{PACKAGE_PREFIX}workers.__main__").main(until_empty=until_empty)


@commands.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this installation, and say how to fix each problem. Exit status 1 if a check finds an error."""
    from dataclasses import asdict

    from app.cli.terminal import show_findings
    from app.maintenance.doctor import examine
    from app.settings import get_settings

    found = list(examine(get_settings()))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        show_findings(found)
    if any(finding.verdict == "error" for finding in found):
        sys.exit(1)


@commands.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet")],
    runs: Annotated[bool, typer.Option("--runs", help="Also copy checkpoints and models")] = False,
) -> None:
    """Copy database and files into a folder, while service and workers run (SQLite)."""
    from app.maintenance.backup import take
    from app.settings import get_settings

    taken = take(get_settings(), folder, runs=runs)
    without = "" if runs else "; without checkpoints and models (--runs copies them)"
    size = f"{taken.bytes / 2**20:.1f} MiB"
    typer.echo(f"{taken.folder}: {taken.jobs} jobs, {taken.files} files, {size}{without}")
    _show_lost(taken.lost)


def _show_lost(files: Sequence[str]) -> None:
    """Says which files' contents were lost before a backup was taken."""
    if files:
        some = ", ".join(files[:5]) + (" …" if len(files) > 5 else "")
        typer.echo(
            f"Warning: the contents of {len(files)} files were missing in the data folder when the backup "
            f"was taken, so jobs that train on them will fail: {some}",
            err=True,
        )


@commands.command()
def restore(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder that accrue backup wrote")
    ],
) -> None:
    """Put a backup into a data folder that has no database yet.

    Jobs that were running when the backup was taken continue from their last checkpoint if it was taken with
    --runs, and from the beginning otherwise.
    """
    from app.maintenance.backup import restore as run
    from app.maintenance.data_folder import held_exclusively
    from app.settings import get_settings

    settings = get_settings()
    with held_exclusively(settings):
        restored = run(settings, folder)
    typer.echo(f"Restored {restored.jobs} jobs and {restored.files} files. Start Accrue with accrue up.")
    _show_lost(restored.lost)


@commands.command()
def migrate() -> None:
    """Upgrade the database's tables to this version of Accrue."""
    from app.settings import get_settings
    from app.storage.migrations import migrate as run

    settings = get_settings()
    settings.make_directories()
    run(settings.resolved_database_url)
    typer.echo("The database is at the newest revision.")
