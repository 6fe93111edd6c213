"""Ingests what a trainer has reported, as its worker does."""

from app.jobs.transitions import Fence
from app.storage.database import Database
from workers.ingest import Position, ingest
from workers.run_directory import RunDirectory


def read_once(
    database: Database, run: RunDirectory, fence: Fence, position: Position | None = None
) -> Position:
    """Reads as much as one transaction does."""
    with database.writing() as session:
        return ingest(session, run, fence, position or Position())


def read(database: Database, run: RunDirectory, fence: Fence, position: Position | None = None) -> Position:
    """Reads everything that has been reported, however slow the machine is."""
    position = read_once(database, run, fence, position)
    while not position.caught_up:
        position = read_once(database, run, fence, position)
    return position
