"""Engine and sessions. SQLite by default, PostgreSQL by URL."""

import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Double

from app.errors import BadSetting, ReplacedDatabase
from app.storage.disk import is_full
from app.storage.session import EVERYBODY, Session, Transaction, Viewer

log = structlog.get_logger("accrue.service")

_FIRST_NAP, _LONGEST_NAP = 0.0005, 0.008

_PAGES_BETWEEN_CHECKPOINTS = 4000
"""Pages of SQLite's write-ahead log (16 MiB), after which a commit copies what it can into the database."""

_POSTGRESQL_REPORT_EVERY, _SQLITE_REPORT_EVERY = 5, 200
"""Every n-th call of `ChangeDetector.any` returns true even if no change was detected: the first number is
for PostgreSQL, where changes cannot be detected, the second for SQLite, where they can."""
_COMMITS_BETWEEN_RESTARTS = 500
_RESTART_MILLISECONDS = 100


class LostTransaction(Exception):
    """The database has discarded the transaction; `__cause__` is the error that made it do so."""


def is_deadlock(error: BaseException | None) -> bool:
    """Whether PostgreSQL ended a statement because two transactions waited for each other."""
    code = getattr(getattr(error, "orig", None), "sqlstate", None)
    return isinstance(error, SQLAlchemyError) and code == "40P01"


class database_now(FunctionElement[float]):  # noqa: N801
    """Unix seconds by the database's own clock: leases of several machines agree on it."""

    type = Double()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: database_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


class Database:
    """One engine with two kinds of session: a writing one holds SQLite's write lock from its start."""

    def __init__(self, url: str, timeout_seconds: float = 30.0, idle_seconds: float = 60.0) -> None:
        """
        Args:
            timeout_seconds: how long a statement waits for SQLite's write lock, or may take on PostgreSQL,
                where it waits for a lock for at most five seconds.
            idle_seconds: how long PostgreSQL waits for the next statement of a transaction before it rolls
                the transaction back, so that a suspended process does not keep its locks.
        """
        self.url = url
        self.engine = _engine(url, timeout_seconds, idle_seconds)
        self._writing = self.engine.execution_options(accrue_writes=True)
        self._timeout_seconds = timeout_seconds
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._commits = count(1)
        self._write_lock = threading.Lock()
        self.viewer = EVERYBODY
        self._transaction: Transaction | None = None
        self._file = _SqliteFile(self.engine) if self.is_sqlite else None

    def seen_by(self, viewer: Viewer) -> "Database":
        """This database, with sessions for a viewer."""
        other = copy(self)
        other.viewer = viewer
        return other

    def within(self, transaction: Transaction) -> "Database":
        """This database within a transaction: each write happens completely or not at all, and is committed
        with the others."""
        other = copy(self)
        other._transaction = transaction
        return other

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for queries; nothing of it is committed."""
        with Session(self.engine, self.viewer) as session:
            yield session

    @contextmanager
    def connecting(self) -> Iterator[Connection]:
        """A connection for short queries; `CompiledStatement` ones begin no transaction."""
        with self.engine.connect() as connection:
            if self.is_sqlite:
                driver: Any = connection.connection.dbapi_connection
                driver.execute(f"PRAGMA busy_timeout={round(1000 * self._timeout_seconds)}")
            yield connection

    def empty_log(self) -> None:
        """Empties SQLite's write-ahead log, where rows stay readable after they were deleted. Does nothing if
        other connections are reading or writing right now."""
        if self.is_sqlite:
            with self.connecting() as connection:
                driver: Any = connection.connection.dbapi_connection
                driver.execute("PRAGMA busy_timeout=0")
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that is committed at its end, and rolled back if it raises.

        Raises:
            LostTransaction: the shared transaction was discarded.
        """
        if self._transaction is not None:
            with _part_of(self._transaction, self.viewer) as session:
                yield session
            return
        with (
            self._exclusive_write(),
            Session(self._writing, self.viewer) as session,
            session.begin(),
        ):
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A transaction that several callers write in (`within`); committed at its end, rolled back if it
        raises."""
        with self._exclusive_write(), self._writing.begin() as connection:
            yield Transaction(connection)

    def check_not_replaced(self) -> None:
        """Checks that the SQLite file is still the one that was opened.

        Raises:
            ReplacedDatabase: the file was deleted or replaced.
        """
        if self._file is not None:
            self._file.check()

    @contextmanager
    def _exclusive_write(self) -> Iterator[None]:
        """Lets one thread write at a time, so that only other processes compete for SQLite's lock."""
        waits = self.is_sqlite and self._write_lock.acquire(timeout=self._timeout_seconds)
        try:
            self.check_not_replaced()
            yield
        finally:
            if waits:
                self._write_lock.release()
        if self.is_sqlite and next(self._commits) % _COMMITS_BETWEEN_RESTARTS == 0:
            self._restart_log()

    def _restart_log(self) -> None:
        """Makes SQLite reuse its write-ahead log from the start.

        SQLite does so by itself once the whole log has been copied into the database. If several processes
        write all the time, that never happens: the log would grow, and every commit would copy pages from it.
        """
        with (
            contextlib.suppress(sqlite3.OperationalError),  # the commit itself has succeeded
            contextlib.closing(self.engine.raw_connection()) as connection,
        ):
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={_RESTART_MILLISECONDS}")
            cursor.execute("PRAGMA wal_checkpoint(RESTART)")

    def fill_pool(self) -> None:
        """Opens the connections that SQLite's pool keeps, so that no request has to, and a process has as
        many open files at its start as later on. PostgreSQL's connections are opened when they are needed."""
        if isinstance(pool := self.engine.pool, QueuePool) and self.is_sqlite:
            with contextlib.ExitStack() as opened:
                for _ in range(pool.size()):
                    opened.enter_context(self.engine.connect())

    def close(self) -> None:
        self.engine.dispose()


def is_unavailable(error: DBAPIError) -> bool:
    """Whether an error says that the database cannot be used right now, and not that a statement is wrong."""
    if error.connection_invalidated or is_full(error):
        return True
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG)
    return isinstance(error, OperationalError) and not _is_beyond_limits(error)


def _is_beyond_limits(error: DBAPIError) -> bool:
    """PostgreSQL's errors of class 54: a statement that is too large, or too complex."""
    return str(getattr(error.orig, "sqlstate", "")).startswith("54")


@contextmanager
def optional_part(session: Session, what: str) -> Iterator[None]:
    """A part of a transaction: if its statements fail, only this part is undone, and the failure is logged.
    Some figures cannot be computed from what a trainer has reported; that must not keep a job from ending.

    Raises:
        DBAPIError: the database cannot be used right now.
    """
    try:
        with session.begin_nested():
            yield
    except DBAPIError as error:
        if is_unavailable(error):
            raise
        log.exception("could not be computed", what=what)


def lock_until_commit(session: Session, what: str) -> bool:
    """Excludes other transactions that call it with the same `what`, until this one ends. On SQLite, writers
    exclude each other anyway.

    Returns:
        Whether a lock was taken: what was read before may be out of date.
    """
    if session.get_bind().dialect.name != "postgresql":
        return False
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(what, 0))))
    return True


class ChangeDetector:
    """Finds out within microseconds whether the database may have changed since the last call, for callers
    that poll it.

    PostgreSQL has no counter of changes, so one in `_POSTGRESQL_REPORT_EVERY` calls reports a change.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._looks = count()

    def any(self) -> bool:
        """True after a change, on the first call, and sometimes without a change, so that callers also do
        work that is due at a certain time."""
        look = next(self._looks)
        if not self._database.is_sqlite:
            return look % _POSTGRESQL_REPORT_EVERY == 0
        if look % _SQLITE_REPORT_EVERY == 0:
            return True
        if self._connection is None:
            name = self._database.engine.url.database or ""
            self._connection = sqlite3.connect(name)
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        changed = bool(version != self._seen)
        self._seen = version
        return changed


class _SqliteFile:
    """The file behind an engine's connections, known by its inode.

    Processes that have a deleted or replaced file open still write to it, and lose everything they commit.
    """

    def __init__(self, engine: Engine) -> None:
        name = engine.url.database
        self._path = None if not name or name == ":memory:" else Path(name)
        self._known: tuple[int, int] | None = None

    def check(self) -> None:
        """Remembers the file's inode on the first call, and checks on later calls that it is the same.

        Raises:
            ReplacedDatabase: the file was deleted or replaced.
        """
        if self._path is None:
            return
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            if self._known is None:  # the file is about to be created
                return
            raise ReplacedDatabase(f"{self._path.name} was deleted") from None
        found = (stat.st_dev, stat.st_ino)
        self._known = self._known or found
        if found != self._known:
            raise ReplacedDatabase(f"{self._path.name} was replaced")


@contextmanager
def _part_of(transaction: Transaction, viewer: Viewer) -> Iterator[Session]:
    """A session whose writes stay in the transaction, or leave nothing in it if it raises.

    Raises:
        LostTransaction: SQLite has rolled back the whole transaction, as it does when the disk is full.
    """
    connection = transaction.connection
    session = Session(connection, viewer, transaction, join_transaction_mode="create_savepoint")
    connection.exec_driver_sql(
        "SAVEPOINT part"
    )  # covers statements that bypass the session (app/storage/compiled.py)
    try:
        yield session
        if session.in_transaction():
            session.commit()
    except Exception as error:
        try:
            session.close()
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT part")
        except SQLAlchemyError:
            raise LostTransaction from error
        raise
    session.close()
    connection.exec_driver_sql("RELEASE SAVEPOINT part")


_LOCK_MILLISECONDS = 5000
"""How long a statement may wait for a locked row on PostgreSQL. Then it fails and can be tried again; a
longer wait would keep a connection from other requests."""
_POOL_SIZE, _POOL_OVERFLOW, _POOL_SECONDS = 10, 30, 10.0
"""PostgreSQL: together as many connections as the service has threads, of which the first stay open."""


def _engine(url: str, timeout_seconds: float, idle_seconds: float) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        _check_driver(url)
        milliseconds = round(1000 * timeout_seconds)
        limits = {
            "lock_timeout": min(milliseconds, _LOCK_MILLISECONDS),
            "statement_timeout": milliseconds,
            "idle_in_transaction_session_timeout": round(1000 * idle_seconds),
        }
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_OVERFLOW,
            pool_timeout=min(timeout_seconds, _POOL_SECONDS),
            connect_args={
                "connect_timeout": max(2, round(timeout_seconds)),
                "options": " ".join(f"-c {name}={value}" for name, value in limits.items()),
                "keepalives_idle": 10,
                "tcp_user_timeout": milliseconds,
            },
        )
    engine = create_engine(url, connect_args={"timeout": timeout_seconds})
    event.listen(engine, "connect", _sqlite_pragmas)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        _sqlite_begin(connection, timeout_seconds)

    return engine


def _check_driver(url: str) -> None:
    """Checks that the database's driver is installed.

    Raises:
        BadSetting: it is not installed.
    """
    try:
        make_url(url).get_dialect().import_dbapi()
    except ImportError as error:
        raise BadSetting(
            f"ACCRUE_DATABASE_URL needs {error.name}: pip install 'accrue[postgresql]', and write the URL as "
            "postgresql+psycopg://…"
        ) from None


def _sqlite_pragmas(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=ON",  # a checkpoint of the log overwrites deleted content in the database
        f"wal_autocheckpoint={_PAGES_BETWEEN_CHECKPOINTS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _sqlite_begin(connection: Connection, timeout_seconds: float) -> None:
    driver: Any = connection.connection.dbapi_connection
    if connection.get_execution_options().get("accrue_writes", False):
        driver.execute("PRAGMA busy_timeout=0")
        if not _try_begin_immediate(driver, timeout_seconds):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        driver.execute(f"PRAGMA busy_timeout={round(1000 * timeout_seconds)}")
        connection.exec_driver_sql("BEGIN")


def _try_begin_immediate(connection: sqlite3.Connection, timeout_seconds: float) -> bool:
    """Takes the write lock, with short random waits. Returns False after the timeout, or if waiting cannot
    help.

    If waiting cannot help, the caller's next statement raises the reason.

    SQLite's own wait backs off to a tenth of a second, during which later writers overtake.
    """
    until = time.monotonic() + timeout_seconds
    nap = _FIRST_NAP
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return True
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                return False
        time.sleep(nap * random.random())
        nap = min(_LONGEST_NAP, 1.5 * nap)


def insert_for(session: Session, table: Any) -> Any:
    """An INSERT in the database's own dialect that supports ON CONFLICT."""
    if session.get_bind().dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    return sqlite.insert(table)
