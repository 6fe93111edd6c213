"""Hot reads, such as a job by its id: through the DBAPI driver, bypassing the ORM and the thread pool.

An ORM session with its transaction and objects takes many times longer than the database needs to find a
row, and so does a switch to another thread.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from anyio import to_thread
from sqlalchemy import JSON, BindParameter, Connection, Select, String, bindparam, or_, select, type_coerce
from sqlalchemy.exc import DBAPIError

from app.errors import NotFound
from app.storage.compiled import CompiledStatement
from app.storage.database import Database
from app.storage.tables import Job, job_of

_COLUMNS = list(Job.__table__.columns)

_PLACES = {column.name: place for place, column in enumerate(_COLUMNS)}
_IN_JSON = [place for place, column in enumerate(_COLUMNS) if isinstance(column.type, JSON)]

JOBS = select(
    *(
        type_coerce(column, String).label(column.name) if isinstance(column.type, JSON) else column
        for column in _COLUMNS
    )
)
"""Every column of every job, with JSON as text."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Row:
    """A job's columns as the driver returns them; two rows are equal if the job did not change in between."""

    values: Sequence[Any]
    json_is_text: bool
    """Whether JSON columns are text, as with SQLite; other drivers decode them."""

    def __getitem__(self, column: str) -> Any:
        """The value of a column that is not JSON."""
        return self.values[_PLACES[column]]

    def job(self) -> Job:
        """The job as a detached object: changes to it are not stored."""
        values = list(self.values)
        for place in _IN_JSON:
            if self.json_is_text and isinstance(values[place], str):  # SQLite returns numbers as they are
                values[place] = json.loads(values[place])
        return job_of(dict(zip(_PLACES, values, strict=True)))


class ImmediateReads:
    """Short reads; on SQLite, they run in the event loop itself."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None

    async def run(self, read: Callable[[Connection], Found]) -> Found:
        """The result of `read`. Only the thread of the event loop may call this."""
        if self._database.is_sqlite:
            try:
                return read(self._own())
            except DBAPIError:  # the database is locked: do not block the event loop
                self.close()
        return await to_thread.run_sync(self._in_a_thread, read)

    def _own(self) -> Connection:
        if self._connection is None:
            self._connection = self._database.engine.connect()
            self._connection.connection.cursor().execute("PRAGMA busy_timeout=0")
        return self._connection

    def _in_a_thread(self, read: Callable[[Connection], Found]) -> Found:
        with self._database.connecting() as connection:
            return read(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def row(connection: Connection, job_id: str, owner: str | None) -> Row:
    """A job's columns.

    Args:
        owner: the key whose jobs are visible; None: all jobs are.

    Raises:
        NotFound: no job has that id, or the job is not visible.
    """
    rows = _JOB.run(connection, {"id": job_id, "owner": owner})
    if not rows:
        raise NotFound(f"No job has the id {job_id}.")
    return Row(rows[0], connection.dialect.name == "sqlite")


def page(
    connection: Connection, query: Select[Any], owner: str | None, limit: int, after: str | None
) -> list[Row]:
    """The rows of a page of jobs, newest first, plus one row if more follow.

    Args:
        query: `JOBS`, with the filters applied.
        owner: as in `row`.
        after: the last id of the previous page.
    """
    if owner is not None:
        query = query.where(Job.owner == owner)
    if after is not None:
        query = query.where(Job.id < after)
    found = connection.execute(query.order_by(Job.id.desc()).limit(limit + 1))
    json_is_text = connection.dialect.name == "sqlite"
    return [Row(tuple(each), json_is_text) for each in found]


def _job(dialect: str) -> Any:
    owner: BindParameter[str | None] = bindparam("owner", type_=String)
    return select(*_COLUMNS).where(Job.id == bindparam("id"), or_(owner.is_(None), Job.owner == owner))


_JOB = CompiledStatement(_job)
