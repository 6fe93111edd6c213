"""Lists the accrue commands."""

from collections.abc import Iterator

from typer.main import get_command

from app.cli import app


def commands() -> Iterator[tuple[str, ...]]:
    """The words of every command and subcommand."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        own = getattr(command, "commands", {})
        yield (name,)
        yield from ((name, each) for each in own)
