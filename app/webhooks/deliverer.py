"""Delivers what is to be told, again and again for a day, from a thread of the service.

Several services over one database share the work: a delivery is taken for a minute by whoever claims it.
"""

import json
import threading
import time
from dataclasses import dataclass

import structlog
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError

from app.database import Database, database_now
from app.models import Delivery
from app.webhooks.addresses import NotAllowed, resolve
from app.webhooks.signature import headers

log = structlog.get_logger("accrue.webhooks")

RETRY_AFTER_SECONDS = (5.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 43200.0)
"""Waits between attempts; after the last of them it is given up."""

_LOOK_EVERY_SECONDS = 1.0
_TAKEN_FOR_SECONDS = 60.0
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class _Taken:
    id: str
    job_id: str
    type: str
    url: str
    created_at: float
    attempts: int
    """This one among them."""


class Deliverer:
    """From `start()` to `close()`."""

    def __init__(self, database: Database, key: bytes | None, *, private_addresses: bool) -> None:
        """
        Args:
            key: that deliveries are signed with; null: none was set, and nothing is delivered.
        """
        self._database = database
        self._key = key
        self._private = private_addresses
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._deliver_on, name="webhooks", daemon=True)

    def start(self) -> None:
        if self._key is not None:
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)

    def _deliver_on(self) -> None:
        while not self._ended.is_set():
            try:
                taken = self._take()
                if taken is not None:
                    self._note(taken, self._deliver(taken))
            except SQLAlchemyError as error:
                log.warning("deliveries cannot be read right now", error=str(error))
                taken = None
            if taken is None:
                self._ended.wait(_LOOK_EVERY_SECONDS)

    def _take(self) -> _Taken | None:
        with self._database.reading() as session:  # most looks find nothing, and need no write lock
            due = select(Delivery.id).where(Delivery.not_before <= database_now()).limit(1)
            if session.scalar(due) is None:
                return None
        with self._database.writing() as session:
            row = session.scalars(
                select(Delivery)
                .where(Delivery.not_before <= database_now())
                .order_by(Delivery.not_before)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).one_or_none()
            if row is None:
                return None
            now = session.scalar(select(database_now())) or 0.0
            row.attempts, row.not_before = row.attempts + 1, now + _TAKEN_FOR_SECONDS
            return _Taken(row.id, row.job_id, row.type, row.url, row.created_at, row.attempts)

    def _deliver(self, taken: _Taken) -> str | None:
        """Null: it arrived; otherwise why not."""
        import httpx2 as httpx  # a service starts sooner without

        assert self._key is not None
        body = json.dumps(
            {
                "id": taken.id,
                "object": "event",
                "created_at": int(taken.created_at),
                "type": taken.type,
                "data": {"id": taken.job_id},
            }
        ).encode()
        try:
            address = resolve(taken.url, private=self._private)
            url = httpx.URL(taken.url)
            with (
                httpx.Client(timeout=_PATIENCE_SECONDS, follow_redirects=False, trust_env=False) as client,
                client.stream(
                    "POST",
                    url.copy_with(host=address),
                    content=body,
                    headers={
                        **headers(self._key, taken.id, int(time.time()), body),
                        "Host": url.netloc.decode(),
                    },
                    extensions={"sni_hostname": url.host},
                ) as answer,
            ):
                return None if answer.is_success else f"it was answered by {answer.status_code}"
        except NotAllowed as error:
            return error.message
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return type(error).__name__
        except Exception as error:
            log.exception("a delivery failed unexpectedly", id=taken.id)  # the others go out all the same
            return type(error).__name__

    def _note(self, taken: _Taken, failure: str | None) -> None:
        given_up = taken.attempts > len(RETRY_AFTER_SECONDS)
        if failure is None or given_up:
            log.info("webhook", id=taken.id, job=taken.job_id, attempts=taken.attempts, outcome=failure)
        wait = None if failure is None or given_up else RETRY_AFTER_SECONDS[taken.attempts - 1]
        with self._database.writing() as session:
            session.execute(
                update(Delivery)
                .where(Delivery.id == taken.id)
                .values(
                    not_before=None if wait is None else database_now() + wait,
                    outcome="delivered" if failure is None else failure,
                )
            )
