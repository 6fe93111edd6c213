"""Statements that run thousands of times: compiled once for each kind of database, run by its driver.

SQLAlchemy's normal execution looks the statement up, binds value by value and wraps the result. That takes
longer than the database itself, and on SQLite it happens while the write lock is held.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.base import Executable
from sqlalchemy.sql.compiler import SQLCompiler

from app.storage.session import Session

Row = Mapping[str, Any]


class CompiledStatement:
    """A statement with named parameters. Values go to the driver as they are: JSON as text.

    Args:
        make: builds the statement for a dialect, given its name.
        columns: the columns of an INSERT, if each of them is a parameter.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy raises it, when the statement is run.
    """

    def __init__(self, make: Callable[[str], Any], columns: Iterable[str] = ()) -> None:
        self._make = make
        self._columns = list(columns) or None
        self._compiled = lru_cache(maxsize=8)(self._compile)

    def run(self, where: Session | Connection, row: Row) -> list[Any]:
        """Runs the statement once. Returns the driver's rows."""
        connection = _connection(where)
        text, bound, given = self._compiled(connection.dialect)
        with _Cursor(connection, text) as cursor:
            cursor.execute(text, bound({**given, **row}))
            return cursor.fetchall() if cursor.description else []

    def run_for_each(self, session: Session, rows: Iterable[Row]) -> None:
        """Runs the statement for each row; there must be at least one."""
        connection = _connection(session)
        text, bound, given = self._compiled(connection.dialect)
        values = [bound({**given, **row} if given else row) for row in rows]
        with _Cursor(connection, text) as cursor:
            cursor.executemany(text, values)

    def _compile(self, dialect: Dialect) -> tuple[str, Callable[[Row], Any], dict[str, Any]]:
        """Its SQL text, a function that turns a row into the driver's parameters, and its literal values."""
        statement: Executable = self._make(dialect.name)
        compiled = statement.compile(dialect=dialect, column_keys=self._columns)  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        binds = compiled.bind_names.items()
        given = {name: bind.effective_value for bind, name in binds if not bind.required}
        return str(compiled), _bind(compiled), given


def _connection(where: Session | Connection) -> Connection:
    if isinstance(where, Connection):
        return where
    return where.bind if isinstance(where.bind, Connection) else where.connection()


def _bind(compiled: SQLCompiler) -> Callable[[Row], Any]:
    if not compiled.positional:
        return lambda row: row
    places = list(compiled.positiontup or [])
    return itemgetter(*places) if len(places) > 1 else lambda row: tuple(row[name] for name in places)


class _Cursor:
    """A driver's cursor that is closed at the end; its errors are converted to SQLAlchemy's."""

    def __init__(self, connection: Connection, text: str) -> None:
        self._connection, self._text = connection, text

    def __enter__(self) -> Any:
        self._cursor = self._connection.connection.cursor()
        return self._cursor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._cursor.close()
        dialect = self._connection.dialect
        if not isinstance(error, dialect.loaded_dbapi.Error):
            return
        lost = dialect.is_disconnect(error, self._connection.connection, self._cursor)
        if lost:
            self._connection.invalidate(error)
        raise DBAPIError.instance(
            self._text, None, error, dialect.loaded_dbapi.Error, connection_invalidated=lost, dialect=dialect
        ) from error
