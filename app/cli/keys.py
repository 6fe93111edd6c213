"""`accrue keys` makes, lists and revokes keys in the database itself, not over HTTP."""

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

_DEVICE_HOURS = "Quota of device hours in a calendar month (UTC); an hour on two devices counts as two"
DeviceHours = Annotated[
    float | None,
    typer.Option(min=0.0, help=f"{_DEVICE_HOURS}; default: no limit"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]

_UNITS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


@commands.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="A name for the key")],
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="SCOPE", help="read, write or admin; repeatable; default: read and write"),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Lifetime, such as 12h, 30d or 8w; default: never expires")
    ] = None,
    device_hours: DeviceHours = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown only once: the service keeps only its digest.

    Once a key exists, every request needs one, even if all keys are revoked later. Jobs, files and
    configurations are visible to the key that made them, and to keys with the scope admin; only these see
    what was made before the first key.
    """
    from app.security.keys import create

    with _database(making=True) as database, database.writing() as session:
        row, key = create(session, name, _scopes(scope or ["read", "write"]), _seconds(expires))
        row.device_hours = device_hours
        shown = {**_fields(row), "key": key}
    typer.echo(json.dumps(shown, indent=2) if as_json else key)
    typer.echo(
        "Save this key now: it cannot be shown again. From now on every request needs a key; revoking all "
        "keys does not undo this. A key sees only the jobs and files that it creates, and those that were "
        "created before the first key are visible only to keys with the scope admin (accrue keys create "
        "NAME --scope admin). To use this key: export ACCRUE_API_KEY=…",
        err=True,
    )


@commands.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List the keys, newest first."""
    from sqlalchemy import select

    from app.cli.tables import show_keys
    from app.storage.tables import Key

    with _database() as database, database.reading() as session:
        shown = [_fields(row) for row in session.scalars(select(Key).order_by(Key.created_at.desc()))]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    show_keys(shown)


@commands.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="key-…, as accrue keys list shows it")]) -> None:
    """Revoke a key: it stops working within a second."""
    from app.security.keys import any_valid, revoke

    with _database() as database, database.writing() as session:
        row = revoke(session, key_id)
        typer.echo(f"{row.id} ({row.name}) is revoked.")
        if not any_valid(session):
            typer.echo(
                "No valid key is left, and every request needs one: accrue keys create NAME --scope admin",
                err=True,
            )


@commands.command("set-quota")
def set_quota(
    key_id: Annotated[str, typer.Argument(help="key-…, as accrue keys list shows it")],
    device_hours: Annotated[
        float | None, typer.Option(min=0.0, help=f"{_DEVICE_HOURS}; required unless --unlimited is given")
    ] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Remove the quota")] = False,
) -> None:
    """Set a key's quota of device hours a month, or remove it.

    A key that has used up its hours submits no more jobs, and its queued jobs wait; running jobs go on.
    """
    if (device_hours is None) != unlimited:
        raise typer.BadParameter("give either --device-hours or --unlimited")
    from app.usage import quotas

    with _database() as database, database.writing() as session:
        row = quotas.set_quota(session, key_id, device_hours)
        limit = "no quota" if device_hours is None else f"a quota of {device_hours:,g} device hours a month"
        typer.echo(f"{row.id} ({row.name}) has {limit}.")


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
    migrate(settings.resolved_database_url)
    typer.echo(f"Data folder of the service: {settings.data_dir.absolute()}", err=True)
    database = Database(settings.resolved_database_url)
    try:
        yield database
    finally:
        database.close()


def _fields(row: "Key") -> dict[str, Any]:
    times = ("created_at", "expires_at", "revoked_at", "last_used_at")
    return {
        "id": row.id,
        "name": row.name,
        "scopes": row.scopes,
        "device_hours": row.device_hours,
        **{name: _date(getattr(row, name)) for name in times},
    }


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _scopes(names: list[str]) -> list[Scope]:
    by_name: dict[str, Scope] = {scope: scope for scope in SCOPES}
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name} is not one of {', '.join(SCOPES)}", param_hint="--scope")
    return [by_name[name] for name in names]


def _seconds(phrase: str | None) -> float | None:
    if phrase is None:
        return None
    found = re.fullmatch(r"(\d{1,5})([hdw])", phrase)
    if found is None:
        raise typer.BadParameter(
            f"{phrase}: give hours, days or weeks, such as 12h, 30d or 8w", param_hint="--expires"
        )
    return int(found[1]) * _UNITS[found[2]]
