"""API keys: `ak_`, 256 random bits and a checksum. Only their SHA-256 is kept."""

import hashlib
import hmac
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import ColumnElement, and_, or_, select, update

from app.errors import NotFound
from app.security.oidc import USER_PREFIX, Identity
from app.security.scopes import SCOPES, Scope
from app.storage.database import Database, database_now, insert_for
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import Key

log = structlog.get_logger("accrue.keys")

PREFIX = "ak_"
_KNOWN_FOR_SECONDS = 1.0
"""How long the result of looking up a key is reused; after that, a revoked key works nowhere."""
_MAX_CACHED = 10_000
_USE_NOTED_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Caller:
    """The caller of a request. Without a key, it is this machine's own user, who may do everything."""

    key_id: str | None
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    @property
    def owner(self) -> str | None:
        """The id of the key whose rows the caller may see, or None for all rows."""
        return None if self.key_id is None or self.may("admin") else self.key_id


LOCAL = Caller(None, frozenset(SCOPES))


def new_key() -> str:
    """Generates a key. It is shown once and is not stored."""
    body = secrets.token_urlsafe(32)
    return f"{PREFIX}{body}{_checksum(body)}"


def is_well_formed(key: str) -> bool:
    """Whether the text has the form of a key. This rejects mistyped keys without a database query."""
    body = key.removeprefix(PREFIX)
    return key.startswith(PREFIX) and len(body) == 51 and _checksum(body[:43]) == body[43:]


def create(
    session: Session, name: str, scopes: Iterable[Scope], expires_in_seconds: float | None
) -> tuple[Key, str]:
    """A key's row, and the key itself, which cannot be recovered later."""
    key = new_key()
    now = session.scalar(select(database_now())) or 0.0
    row = Key(
        id=new_id("key"),
        name=name,
        digest=_digest(key),
        scopes=[scope for scope in SCOPES if scope in set(scopes)],
        created_at=now,
        expires_at=None if expires_in_seconds is None else now + expires_in_seconds,
    )
    session.add(row)
    session.flush()
    return row, key


def store_user(session: Session, identity: Identity) -> None:
    """Creates or updates the row of a user of the OpenID Connect provider. No key matches
    this row, since its digest is not a SHA-256."""
    values = {"name": identity.name, "scopes": list(identity.scopes)}
    statement = insert_for(session, Key).values(
        id=identity.id, digest=f"oidc {identity.id}", created_at=database_now(), **values
    )
    session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def revoke(session: Session, key_id: str) -> Key:
    """Revokes a key; a revoked key keeps its first time of revocation.

    Raises:
        NotFound: no key has that id.
    """
    row = session.get(Key, key_id)
    if row is None:
        raise NotFound(f"No key has the id {key_id}: accrue keys list shows them.")
    if row.revoked_at is None:
        row.revoked_at = session.scalar(select(database_now()))
    return row


def any_made(session: Session) -> bool:
    """Whether a key was ever created: from then on, every request but the health checks needs one."""
    return session.scalar(select(Key.id).limit(1)) is not None


def any_valid(session: Session) -> bool:
    """Whether any valid key exists, besides users of a sign-in provider."""
    own = Key.id.not_like(f"{USER_PREFIX}%")
    return session.scalar(select(Key.id).where(_valid(), own).limit(1)) is not None


def _valid() -> ColumnElement[bool]:
    return and_(Key.revoked_at.is_(None), or_(Key.expires_at.is_(None), Key.expires_at > database_now()))


class Keyring:
    """Which keys open this service, looked up at most once a second each. To be closed before the
    database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Caller | None]] = {}
        self._noted: dict[str, float] = {}
        self._uses = ThreadPoolExecutor(1, "key-use")
        """Records uses beside the requests, which may only read: a write may have to wait for another
        process."""
        self._requires_key: tuple[float, bool] = (0.0, False)

    def requires_key(self) -> bool | None:
        """Whether requests need a key, or None if the database must be read again. True never changes
        back."""
        until, required = self._requires_key
        return required if required or time.monotonic() < until else None

    def read_requires_key(self) -> bool:
        with self._database.reading() as session:
            required = any_made(session)
        self._requires_key = time.monotonic() + _KNOWN_FOR_SECONDS, required
        return required

    def cached(self, key: str) -> tuple[bool, Caller | None]:
        """Whether the cache knows the key, and its caller; does not read the database."""
        if not is_well_formed(key):
            return True, None
        until, caller = self._known.get(_digest(key), (0.0, None))
        return time.monotonic() < until, caller

    def find(self, key: str) -> Caller | None:
        """The caller with that key; None if the key is not valid."""
        digest = _digest(key)
        with self._database.reading() as session:
            row = session.scalars(select(Key).where(Key.digest == digest, _valid())).one_or_none()
        caller = None
        if row is not None and hmac.compare_digest(row.digest, digest):
            caller = Caller(row.id, frozenset(row.scopes))
            self._note_use(row.id)
        self._remember(digest, caller)
        return caller

    def _remember(self, digest: str, caller: Caller | None) -> None:
        with self._lock:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[digest] = time.monotonic() + _KNOWN_FOR_SECONDS, caller

    def cached_user(self, token: str) -> tuple[bool, Caller | None]:
        """Whether the cache knows the token of a user, and its caller; does not read the database."""
        until, caller = self._known.get(_digest(token), (0.0, None))
        return time.monotonic() < until, caller

    def find_user(self, identity: Identity, token: str) -> Caller | None:
        """The caller for a user of the provider; None if its row was revoked. The row is created beside the
        request, when the user signs in for the first time: a write may have to wait for another process.

        Args:
            token: by which the result is cached.
        """
        with self._database.reading() as session:
            row = session.get(Key, identity.id)
            is_current = row is not None and (row.name, tuple(row.scopes)) == (identity.name, identity.scopes)
            is_revoked = row is not None and row.revoked_at is not None
        if not is_current and not is_revoked:
            self._note(f"row of {identity.id}" if row is not None else None, self._write_user, identity)
        caller = None if is_revoked else Caller(identity.id, frozenset(identity.scopes))
        if caller is not None:
            self._note_use(identity.id)
        self._remember(_digest(token), caller)
        return caller

    def close(self) -> None:
        """Returns once no use of a key is being recorded; uses that still wait are not recorded."""
        self._uses.shutdown(cancel_futures=True)

    def _note_use(self, key_id: str) -> None:
        self._note(key_id, self._write_use, key_id)

    def _note(self, what: str | None, write: Callable[..., None], *arguments: Any) -> None:
        """Runs `write` on another thread: at most once a minute for each `what`, or every time if it is
        None."""
        if what is not None:
            with self._lock:
                if time.monotonic() < self._noted.get(what, 0.0):
                    return
                self._noted[what] = time.monotonic() + _USE_NOTED_EVERY_SECONDS
        self._uses.submit(write, *arguments)

    def _write_user(self, identity: Identity) -> None:
        try:
            with self._database.writing() as session:
                store_user(session, identity)
        except Exception:
            log.warning("a user could not be stored", key=identity.id, exc_info=True)

    def _write_use(self, key_id: str) -> None:
        try:
            with self._database.writing() as session:
                session.execute(update(Key).where(Key.id == key_id).values(last_used_at=database_now()))
        except Exception:
            log.warning("the use of a key could not be recorded", key=key_id, exc_info=True)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
