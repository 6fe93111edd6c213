"""The audit log: who changed what, when, and from where, in rows that an admin can read.

A thread writes the rows in batches, so requests do not wait for them. A service that is killed loses the rows
of its last moment; the events of the jobs themselves are complete.
"""

import queue
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from sqlalchemy import delete, insert
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from app.errors import ReplacedDatabase
from app.storage.database import Database
from app.storage.ids import new_id
from app.storage.tables import AuditEntry

log = structlog.get_logger("accrue.audit")

_BATCH = 1000
_PAUSE_SECONDS = 0.2
"""How long records are gathered for one transaction, unless the log is being closed."""
_MAX_QUEUED = 100_000
_CLEANUP_INTERVAL_SECONDS = 3600.0

MAX_UNAUTHENTICATED_PER_MINUTE = 100
"""The maximum number of requests without a valid key that the log keeps per minute."""

MAX_REFUSED_PER_MINUTE = 100
"""The maximum number of refused requests (status 4xx) of one key that the log keeps per minute."""


@dataclass(frozen=True)
class AuditRecord:
    """One request."""

    at: float
    """Unix seconds."""
    key_id: str | None
    method: str
    path: str
    status: int
    address: str
    request_id: str


class AuditLog:
    """Writes audit records to the database, from `start()` to `close()`."""

    def __init__(self, database: Database, kept_days: float) -> None:
        self._database = database
        self._kept_seconds = 86400 * kept_days
        self._waiting: queue.Queue[AuditRecord | None] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._unauthenticated: tuple[int, int] = (0, 0)
        """The current minute, and the number of unauthenticated requests in it."""
        self._refused_in, self._refused = 0, Counter[str | None]()
        """The current minute, and the number of refused requests in it, by key."""

    def start(self) -> None:
        self._delete_old()
        self._thread.start()

    def note(self, record: AuditRecord, *, is_known: bool = True) -> None:
        """Notes a request; never waits.

        Args:
            is_known: whether the request had a valid key or came from this machine's own user. Only
                `MAX_UNAUTHENTICATED_PER_MINUTE` other requests are kept, so that nobody can fill the disk.
        """
        if not is_known and not self._has_room_for_unauthenticated():
            return
        refused = 400 <= record.status < 500
        if is_known and refused and not self._has_room_for_refused(record.key_id):
            return
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            log.error("the audit log cannot be written: an entry is lost", **asdict(record))

    def _has_room_for_unauthenticated(self) -> bool:
        minute, count = int(time.monotonic() // 60), 0
        if self._unauthenticated[0] == minute:
            count = self._unauthenticated[1]
        self._unauthenticated = (minute, count + 1)
        if count == MAX_UNAUTHENTICATED_PER_MINUTE:
            log.warning(
                "too many unauthenticated requests: the audit log drops the rest of this minute", kept=count
            )
        return count < MAX_UNAUTHENTICATED_PER_MINUTE

    def _has_room_for_refused(self, key_id: str | None) -> bool:
        minute = int(time.monotonic() // 60)
        if self._refused_in != minute:
            self._refused_in = minute
            self._refused.clear()
        self._refused[key_id] += 1
        if self._refused[key_id] == MAX_REFUSED_PER_MINUTE + 1:
            log.warning("too many refused requests: the audit log drops the rest of this minute", key=key_id)
        return self._refused[key_id] <= MAX_REFUSED_PER_MINUTE

    def close(self) -> None:
        """Returns once all records are written, or after ten seconds."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        ended = False
        while not ended:
            records = [self._waiting.get()]
            self._closing.wait(_PAUSE_SECONDS)
            while len(records) < _BATCH and not self._waiting.empty():
                records.append(self._waiting.get())
            ended = None in records
            rows = [_row(record) for record in records if record is not None]
            if rows:
                self._store(rows)
            if time.monotonic() > self._next_cleanup_at:
                try:
                    self._delete_old()
                except (SQLAlchemyError, ReplacedDatabase) as error:
                    log.warning("old entries cannot be deleted right now", error=str(error))

    def _store(self, rows: list[dict[str, Any]]) -> None:
        try:
            with self._database.writing() as session:
                session.execute(insert(AuditEntry), rows)
        except (SQLAlchemyError, ReplacedDatabase) as error:
            database_is_away = isinstance(error, OperationalError | ReplacedDatabase)
            if len(rows) > 1 and not database_is_away:
                for row in rows:  # one that cannot be stored must not take the others with it
                    self._store([row])
                return
            for row in rows:
                log.error("could not write an audit entry", **row, error=str(error))

    def _delete_old(self) -> None:
        self._next_cleanup_at = time.monotonic() + _CLEANUP_INTERVAL_SECONDS
        with self._database.writing() as session:
            old = delete(AuditEntry).where(AuditEntry.at < time.time() - self._kept_seconds)
            session.execute(old, execution_options={"synchronize_session": False})


def _row(record: AuditRecord) -> dict[str, Any]:
    return {"id": new_id("audit"), **asdict(record)}
