"""Statements that run thousands of times: compiled once for each kind of database, bound by the driver.

SQLAlchemy's own way looks the statement up and binds value by value, which takes longer than the database
does, and on SQLite with the write lock held.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import CursorResult, Dialect
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import Executable
from sqlalchemy.sql.compiler import SQLCompiler

Row = Mapping[str, Any]


class Prepared:
    """A statement with named parameters. Values go to the driver as they are: JSON as text.

    Args:
        make: the statement, for a dialect's name.
        columns: of an INSERT that takes every one of them as a parameter.
    """

    def __init__(self, make: Any, columns: Iterable[str] = ()) -> None:
        self._make = make
        self._columns = list(columns) or None
        self._compiled = lru_cache(maxsize=8)(self._compile)

    def run(self, session: Session, row: Row) -> CursorResult[Any]:
        """Once."""
        connection = session.connection()
        text, places, given = self._compiled(connection.dialect)
        return connection.exec_driver_sql(text, _bound({**given, **row}, places))

    def run_for_each(self, session: Session, rows: Iterable[Row]) -> None:
        """For at least one row."""
        connection = session.connection()
        text, places, given = self._compiled(connection.dialect)
        connection.exec_driver_sql(text, [_bound({**given, **row}, places) for row in rows])

    def _compile(self, dialect: Dialect) -> tuple[str, list[str] | None, dict[str, Any]]:
        """Its text, the order of its values (null: they go by name), and those that are in the statement."""
        statement: Executable = self._make(dialect.name)
        compiled = statement.compile(dialect=dialect, column_keys=self._columns)  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        binds = compiled.bind_names.items()
        given = {name: bind.effective_value for bind, name in binds if not bind.required}
        return str(compiled), list(compiled.positiontup or []) if compiled.positional else None, given


def _bound(row: Row, places: list[str] | None) -> Any:
    return row if places is None else tuple([row[name] for name in places])
