"""Delivers webhooks from six threads of the service, with seven retries within a day.

Several services over one database share the work: each claims a delivery for a minute.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from standardwebhooks import Webhook

from app.errors import ReplacedDatabase
from app.storage.database import Database, database_now
from app.storage.tables import Delivery, Job
from app.webhooks.addresses import NotAllowed, resolve
from app.webhooks.signature import headers

if TYPE_CHECKING:
    import httpx2 as httpx

log = structlog.get_logger("accrue.webhooks")

RETRY_AFTER_SECONDS = (5.0, 30.0, 120.0, 600.0, 3600.0, 21600.0, 43200.0)
"""Waits between attempts; after the last one, the delivery is given up."""

_POLL_SECONDS = 1.0
_TAKEN_FOR_SECONDS = 60.0
_TIMEOUT_SECONDS = 10.0
"""The time limit of a delivery, from resolving the host to the status of the response."""

_THREADS = 6
"""The number of concurrent deliveries."""

_MAX_PER_OWNER, _MAX_PER_HOST = 3, 2
"""Deliveries at a time for one owner, and to one host: a receiver that never answers delays only its own
deliveries."""

_REMEMBERED = 10_000
"""The maximum number of owners and hosts whose last delivery is remembered."""

_LOOKED_AT = 200
"""The maximum number of due deliveries among which one is chosen."""


@dataclass(frozen=True)
class _ClaimedDelivery:
    id: str
    job_id: str
    type: str
    url: str
    created_at: float
    attempts: int
    """Including this one."""
    owner: str | None
    host: str | None


class Deliverer:
    """Delivers webhooks from `start()` to `close()`."""

    def __init__(self, database: Database, signing: Webhook | None, *, private_addresses: bool) -> None:
        """
        Args:
            signing: signs deliveries; None if no secret is set, in which case nothing is delivered.
        """
        self._database = database
        self._signing = signing
        self._private = private_addresses
        self._ended = threading.Event()
        self._choosing = threading.Lock()
        self._under_way: Counter[tuple[str, str | None]] = Counter()
        """Deliveries in progress, by owner and by host."""
        self._served: dict[tuple[str | None, str | None], int] = {}
        """The turn in which an owner's last delivery to a host began; the host None stands for any host."""
        self._turns = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"webhooks-{number}", daemon=True)
            for number in range(_THREADS)
        ]

    def start(self) -> None:
        if self._signing is not None:
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        self._ended.set()
        until = time.monotonic() + _TIMEOUT_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                taken = self._take()
                if taken is not None:
                    try:
                        self._note(taken, self._deliver(taken))
                    finally:
                        with self._choosing:
                            self._under_way.subtract(_counted(taken.owner, taken.host))
                            self._under_way += Counter()  # removes zero counts
            except (SQLAlchemyError, ReplacedDatabase) as error:
                log.warning("deliveries cannot be read right now", error=str(error))
                taken = None
            if taken is None:
                self._ended.wait(_POLL_SECONDS)

    def _take(self) -> _ClaimedDelivery | None:
        with self._choosing:
            taken = self._taken()
            if taken is not None:
                self._under_way.update(_counted(taken.owner, taken.host))
            return taken

    def _taken(self) -> _ClaimedDelivery | None:
        """The first due delivery whose owner and host are below their limits."""
        busy = [
            name for (kind, name), n in self._under_way.items() if kind == "owner" and n >= _MAX_PER_OWNER
        ]
        turn = func.row_number().over(
            partition_by=(Job.owner, Delivery.host), order_by=(Delivery.not_before, Delivery.id)
        )
        of_owner = func.row_number().over(partition_by=Job.owner, order_by=(Delivery.not_before, Delivery.id))
        each = (
            select(
                Delivery.id,
                Delivery.host,
                Delivery.not_before,
                Job.owner,
                turn.label("turn"),
                of_owner.label("of_owner"),
            )
            .join(Job, Job.id == Delivery.job_id)
            .where(Delivery.not_before <= database_now())
            .where(or_(Job.owner.is_(None), Job.owner.not_in([name for name in busy if name is not None])))
            .subquery()
        )
        due = (
            select(each.c.id, each.c.host, each.c.owner)
            .where(each.c.turn <= _MAX_PER_HOST)  # the others must wait for these anyway
            .order_by(each.c.of_owner, each.c.not_before)  # the first of each owner before the second of any
            .limit(_LOOKED_AT)
        )
        with self._database.reading() as session:  # most queries find nothing, and need no write lock
            found = session.execute(due).all()
        for delivery_id, host, owner in sorted(found, key=lambda row: self._last_turns(row[2], row[1])):
            if self._has_place(owner, host):
                self._note_served(owner, host)
                return self._claimed(delivery_id, owner, host)
        return None

    def _note_served(self, owner: str | None, host: str | None) -> None:
        self._turns += 1
        for key in ((owner, None), (owner, host)):
            self._served.pop(key, None)
            while len(self._served) >= _REMEMBERED:
                del self._served[next(iter(self._served))]
            self._served[key] = self._turns

    def _last_turns(self, owner: str | None, host: str | None) -> tuple[int, int]:
        """A sort key by which owners take turns, and so do an owner's hosts: the one served last comes
        last."""
        return self._served.get((owner, None), 0), self._served.get((owner, host), 0)

    def _has_place(self, owner: str | None, host: str | None) -> bool:
        """Deliveries without an owner, as in a service without keys, are limited only by host."""
        own = owner is None or self._under_way["owner", owner] < _MAX_PER_OWNER
        return own and self._under_way["host", host] < _MAX_PER_HOST

    def _claimed(self, delivery_id: str, owner: str | None, host: str | None) -> _ClaimedDelivery | None:
        with self._database.writing() as session:
            still_due = select(Delivery).where(
                Delivery.id == delivery_id, Delivery.not_before <= database_now()
            )
            row = session.scalars(still_due.with_for_update(skip_locked=True)).one_or_none()
            if row is None:  # another service was faster
                return None
            now = session.scalar(select(database_now())) or 0.0
            row.attempts, row.not_before = row.attempts + 1, now + _TAKEN_FOR_SECONDS
            return _ClaimedDelivery(
                row.id, row.job_id, row.type, row.url, row.created_at, row.attempts, owner, host
            )

    def _deliver(self, taken: _ClaimedDelivery) -> str | None:
        """Sends a delivery. Returns None on success, or the reason of the failure."""
        import httpx2 as httpx  # not at module level, so that the service starts faster

        assert self._signing is not None
        until = time.monotonic() + _TIMEOUT_SECONDS
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
            request = httpx.Request(
                "POST",
                url.copy_with(host=address),
                content=body,
                headers={
                    **headers(self._signing, taken.id, body),
                    "Host": url.netloc.decode(),
                },
                extensions={"sni_hostname": url.host},
            )
            status = asyncio.run(_status_of(request, until - time.monotonic()))
            return None if 200 <= status < 300 else f"the receiver answered with status {status}"
        except TimeoutError:
            return f"the receiver did not answer within {_TIMEOUT_SECONDS:g} s"
        except NotAllowed as error:
            return error.message
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return type(error).__name__
        except Exception as error:
            log.exception("a delivery failed unexpectedly", id=taken.id)  # go on with the other deliveries
            return type(error).__name__

    def _note(self, taken: _ClaimedDelivery, failure: str | None) -> None:
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


def _counted(owner: str | None, host: str | None) -> list[tuple[str, str | None]]:
    return [("owner", owner), ("host", host)]


async def _status_of(request: "httpx.Request", seconds: float) -> int:
    """Sends a request and returns the status of the response, without reading the response's body.

    Raises:
        TimeoutError: it takes longer, even if bytes of the response keep arriving.
        httpx.HTTPError: it cannot be sent.
    """
    import httpx2 as httpx

    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(timeout=seconds, follow_redirects=False, trust_env=False) as client,
    ):
        answer = await client.send(request, stream=True)
        await answer.aclose()
        return int(answer.status_code)
