"""`accrue keys`: made, listed and revoked where the database is, not over HTTP."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.errors import NotFound
from app.security.scopes import SCOPES, Scope

if TYPE_CHECKING:
    from app.storage.database import Database
    from app.storage.tables import Key

commands = typer.Typer(no_args_is_help=True, help="API keys: once one exists, every request needs one.")

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON")]

_UNITS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


@commands.command("create")
def make(
    name: Annotated[str, typer.Argument(help="What you will know it by")],
    scope: Annotated[
        list[str] | None, typer.Option(help="read, write or admin, once for each; default: read and write")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="As in 12h, 30d, 8w; default: never")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once: only its digest is kept.

    What is made with a key is seen by that key alone, and by those with the scope admin.
    """
    from app.security.keys import create

    with _database(making=True) as database, database.writing() as session:
        row, key = create(session, name, _scopes(scope or ["read", "write"]), _seconds(expires))
        told = {**_told(row), "key": key}
    typer.echo(json.dumps(told, indent=2) if as_json else key)
    typer.echo(
        "Shown this once. From now on every call needs a key, even when all are revoked. This one sees what "
        "is made with it; what was made before, or with others, only a key with --scope admin sees. For the "
        "command: export ACCRUE_API_KEY=…",
        err=True,
    )


@commands.command("list")
def show(as_json: AsJson = False) -> None:
    """List the keys, newest first."""
    from sqlalchemy import select

    from app.cli.tables import show_keys
    from app.storage.tables import Key

    with _database() as database, database.reading() as session:
        told = [_told(row) for row in session.scalars(select(Key).order_by(Key.id.desc()))]
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    show_keys(told)


@commands.command("revoke")
def end(key_id: Annotated[str, typer.Argument(help="key-…, as accrue keys list shows it")]) -> None:
    """Revoke a key: a second later it opens nothing any more."""
    from app.security.keys import any_valid, revoke

    with _database() as database, database.writing() as session:
        row = revoke(session, key_id)
        typer.echo(f"{row.id} ({row.name}) is revoked.")
        if not any_valid(session):
            typer.echo(
                "No valid key is left, and every request needs one: accrue keys create NAME --scope admin",
                err=True,
            )


@contextmanager
def _database(*, making: bool = False) -> Iterator["Database"]:
    from app.settings import get_settings
    from app.storage.database import Database
    from app.storage.migrations import migrate

    settings = get_settings()
    if not making and not settings.data_dir.is_dir():
        raise NotFound(
            f"there is no data folder {settings.data_dir.absolute()}: run this where the service was "
            "started, or set ACCRUE_DATA_DIR"
        )
    settings.make_directories()
    migrate(settings.url)
    typer.echo(f"Of the service whose data folder is {settings.data_dir.absolute()}:", err=True)
    database = Database(settings.url)
    try:
        yield database
    finally:
        database.close()


def _told(row: "Key") -> dict[str, Any]:
    times = ("created_at", "expires_at", "revoked_at", "last_used_at")
    return {
        "id": row.id,
        "name": row.name,
        "scopes": row.scopes,
        **{name: _date(getattr(row, name)) for name in times},
    }


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _scopes(names: list[str]) -> list[Scope]:
    by_name: dict[str, Scope] = {scope: scope for scope in SCOPES}
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name} is none of {', '.join(SCOPES)}", param_hint="--scope")
    return [by_name[name] for name in names]


def _seconds(phrase: str | None) -> float | None:
    if phrase is None:
        return None
    found = re.fullmatch(r"(\d{1,5})([hdw])", phrase)
    if found is None:
        raise typer.BadParameter(
            f"{phrase}: say hours, days or weeks, as in 12h, 30d or 8w", param_hint="--expires"
        )
    return int(found[1]) * _UNITS[found[2]]
