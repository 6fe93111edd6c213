"""Webhooks: signed so that OpenAI's client accepts them, retried, never sent to forbidden addresses."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from pydantic import SecretStr
from sqlalchemy import select, update
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.testclient import TestClient

from app.contract.public_addresses import is_public
from app.errors import BadSetting
from app.jobs import lifecycle, queue
from app.main import create_app
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Delivery, Job
from app.webhooks import deliverer as module
from app.webhooks.addresses import NotAllowed, check, resolve
from app.webhooks.deliverer import Deliverer
from app.webhooks.signature import signer
from tests.harness.claims import claim
from tests.harness.dripping import slow_server
from tests.harness.runs import until
from tests.harness.submissions import submitted

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


class Receiver:
    """A webhook receiver that records deliveries, and answers with prescribed statuses."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((dict(self.headers.items()), body))
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://169.254.169.254/latest/meta-data")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self._server.server_port}/told?x=1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def delivering(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deliverer]:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(module, "RETRY_AFTER_SECONDS", (0.1, 0.1))
    started = Deliverer(database, signer(SECRET), private_addresses=True)
    started.start()
    yield started
    started.close()


def with_webhook(database: Database, url: str) -> str:
    job_id = submitted(database)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(webhook_url=url))
    return job_id


def cancelled(database: Database, url: str) -> str:
    job_id = with_webhook(database, url)
    with database.writing() as session:
        lifecycle.cancel(session, job_id)
    return job_id


def outcomes(database: Database) -> list[tuple[int, float | None, str | None]]:
    with database.reading() as session:
        rows = session.scalars(select(Delivery).order_by(Delivery.id))
        return [(row.attempts, row.not_before, row.outcome) for row in rows]


def test_the_openai_client_verifies_a_delivery(
    database: Database, receiver: Receiver, delivering: Deliverer
) -> None:
    job_id = cancelled(database, receiver.url)
    until(lambda: outcomes(database) == [(1, None, "delivered")], 10)
    ((headers, body),) = receiver.got
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    event = client.webhooks.unwrap(body, headers)
    assert (event.type, event.data.id) == ("fine_tuning.job.cancelled", job_id)  # type: ignore[union-attr]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.replace(b"cancelled", b"succeeded"), headers)
    assert headers["Host"] == receiver.url.split("/")[2]


def test_each_end_and_pause_is_delivered_once(database: Database) -> None:
    first, second = (with_webhook(database, "https://example.org/") for _ in range(2))
    with database.writing() as session:
        lifecycle.pause(session, first)
        lifecycle.resume(session, first)
    with database.writing() as session:
        lifecycle.cancel(session, second)
        lifecycle.cancel(session, second)
    fence = claim(database)
    assert fence is not None
    with database.writing() as session:
        queue.succeed(session, fence, {"files": []})
    submitted(database)  # without a webhook
    with database.reading() as session:
        told = session.execute(select(Delivery.job_id, Delivery.type).order_by(Delivery.id)).all()
    assert [tuple(row) for row in told] == [
        (first, "fine_tuning.job.paused"),
        (second, "fine_tuning.job.cancelled"),
        (first, "fine_tuning.job.succeeded"),
    ]


def test_a_rejected_delivery_is_retried_under_the_same_id(
    database: Database, receiver: Receiver, delivering: Deliverer
) -> None:
    receiver.statuses = [500, 302]
    cancelled(database, receiver.url)
    until(lambda: outcomes(database) == [(3, None, "delivered")], 10)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len(receiver.got) == 3  # nobody followed the redirect


def test_a_delivery_stops_after_its_last_retry(
    database: Database, receiver: Receiver, delivering: Deliverer
) -> None:
    receiver.statuses = [503] * 10
    cancelled(database, receiver.url)
    until(lambda: outcomes(database) == [(3, None, "the receiver answered with status 503")], 10)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254",
     "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]", "100.64.0.1",
     "[2002:7f00:1::]", "[64:ff9b::7f00:1]", "224.0.0.1", "255.255.255.255"],
)  # fmt: skip
def test_addresses_of_no_public_host_are_refused(host: str) -> None:
    with pytest.raises(NotAllowed):
        resolve(f"http://{host}:80/x", private=False)
    if host != "localhost":
        with pytest.raises(NotAllowed):
            check(f"https://{host}/x", private=False)
        check(f"https://{host}/x", private=True)


def test_public_addresses_are_accepted() -> None:
    assert all(is_public(ip_address(each)) for each in ("8.8.8.8", "2606:4700:4700::1111"))
    check("https://8.8.8.8/x", private=False)
    check("https://name.that.nobody.asks.about.example/x", private=False)


def test_a_host_that_resolves_to_a_private_address_is_rejected_at_delivery(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_SECONDS", ())
    started = Deliverer(database, signer(SECRET), private_addresses=False)
    started.start()
    cancelled(database, receiver.url)
    until(lambda: outcomes(database)[0][2] is not None, 10)
    started.close()
    assert "not on the public internet" in str(outcomes(database)[0][2])
    assert receiver.got == []


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "none", "whsec_!!!", SECRET[6:]])
def test_an_invalid_webhook_secret_is_reported(secret: str) -> None:
    with pytest.raises(BadSetting, match="ACCRUE_WEBHOOK_SECRET"):
        signer(secret)


def test_a_delivery_s_body_contains_only_the_documented_fields(
    database: Database, receiver: Receiver, delivering: Deliverer
) -> None:
    cancelled(database, receiver.url)
    until(lambda: bool(receiver.got), 10)
    told: dict[str, Any] = json.loads(receiver.got[0][1])
    assert set(told) == {"id", "object", "created_at", "type", "data"}
    assert set(told["data"]) == {"id"}


def test_an_undeliverable_webhook_does_not_block_others(
    database: Database, receiver: Receiver, delivering: Deliverer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_as_ever = module.resolve

    def broken(url: str, *, private: bool) -> str:
        if "broken" in url:
            raise RuntimeError("of our own making")
        return resolve_as_ever(url, private=private)

    monkeypatch.setattr(module, "resolve", broken)
    cancelled(database, "http://broken.example/")
    cancelled(database, "http://localhost:port/")
    cancelled(database, receiver.url)
    told = [(3, None, "RuntimeError"), (3, None, "it is not a "), (1, None, "delivered")]
    until(lambda: [(a, due, str(o)[:12]) for a, due, o in outcomes(database)] == told, 20)


def test_a_default_webhook_url_on_a_private_network_is_rejected(settings: Settings) -> None:
    own = {"webhook_url": "http://127.0.0.1:9/", "webhook_secret": SecretStr(SECRET)}
    with pytest.raises(BadSetting, match=r"ACCRUE_WEBHOOK_URL.*public internet"):
        create_app(settings.model_copy(update=own))
    create_app(settings.model_copy(update={**own, "webhook_private_addresses": True}))


def test_a_webhook_url_requires_a_secret(settings: Settings) -> None:
    with pytest.raises(BadSetting, match="always signed"):
        create_app(settings.model_copy(update={"webhook_url": "https://example.org/"}))


@pytest.mark.parametrize(
    ("url", "secret", "said"),
    [
        ("https://example.org/", None, "ask its operator to set ACCRUE_WEBHOOK_SECRET"),
        ("http://127.0.0.1/", SECRET, "public internet"),
        ("HTTP://127.0.0.1/", SECRET, "public internet"),
        ("http://user:password@example.org/", SECRET, "webhook_url"),
        ("http://[abc/", SECRET, "not a valid URL"),
        ("http://example.org:port/", SECRET, "not a valid URL"),
        ("http://" + "a" * 300, SECRET, "not a valid URL"),
    ],
)
def test_a_job_with_an_unusable_webhook_url_is_rejected(
    settings: Settings, url: str, secret: str | None, said: str
) -> None:
    own = settings.model_copy(update={"webhook_secret": None if secret is None else SecretStr(secret)})
    with TestClient(create_app(own), base_url="http://127.0.0.1:8000") as client:
        body = {
            "model_name": "accrue/tiny-gpt2",
            "webhook_url": url,
            "target_effective_batch_size": 4,
            "dataset_config": {"texts": ["a b c"]},
        }
        answer = client.post("/gradient-accumulation/training/large-batch", json=body)
    assert answer.status_code in (400, 422)
    assert said in answer.text


def test_a_receiver_that_answers_too_slowly_times_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then renews every timeout but the whole delivery's."""
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 1.0)
    slow = Deliverer(database, signer(SECRET), private_addresses=True)
    with slow_server() as url:
        began = time.monotonic()
        failure = slow._deliver(
            module._ClaimedDelivery("evt-1", "ftjob-1", "t", url, 0.0, 1, None, "127.0.0.1")
        )
    assert failure is not None
    assert "did not answer" in failure
    assert time.monotonic() - began < 20  # the drip takes a hundred seconds


def test_site_local_addresses_are_private() -> None:
    assert not is_public(ip_address("fec0::1"))
    assert not is_public(ip_address("feff::1"))


@pytest.mark.parametrize(
    "address", ["168.63.129.16", "192.0.0.192", "192.88.99.1", "3fff::1", "2001:4860::5efe:7f00:1"]
)
def test_addresses_that_only_look_public_are_not(address: str) -> None:
    assert not is_public(ip_address(address))


def test_silent_receivers_delay_only_their_owner_s_deliveries(database: Database) -> None:
    deliverer = Deliverer(database, signer(SECRET), private_addresses=True)
    for host in ("slow.example", "slow.example"):
        assert deliverer._has_place("alice", host)
        deliverer._under_way.update(module._counted("alice", host))
    assert not deliverer._has_place("bob", "slow.example")
    assert deliverer._has_place("alice", "another.example")
    deliverer._under_way.update(module._counted("alice", "another.example"))
    assert not deliverer._has_place("alice", "good.example")
    assert deliverer._has_place("bob", "good.example")
    assert deliverer._has_place(None, "good.example")


def test_the_standardwebhooks_library_accepts_a_delivery(
    database: Database, receiver: Receiver, delivering: Deliverer
) -> None:
    cancelled(database, receiver.url)
    until(lambda: bool(receiver.got), 10)
    headers, body = receiver.got[0]
    assert Webhook(SECRET).verify(body, headers) == json.loads(body)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(bytes(32)).decode()).verify(body, headers)


def test_many_deliveries_of_one_owner_do_not_delay_another_owner(database: Database) -> None:
    owned = {owner: submitted(database) for owner in ("alice", "bob")}
    with database.writing() as session:
        for owner, job_id in owned.items():
            session.execute(update(Job).where(Job.id == job_id).values(owner=owner))
        for number in range(1000):
            session.add(due(f"evt-a{number}", owned["alice"], f"http://slow.example/{number}", float(number)))
        session.add(due("evt-b", owned["bob"], "http://good.example/", 2000.0))
    deliverer = Deliverer(database, signer(SECRET), private_addresses=True)
    chosen = [deliverer._take() for _ in range(3)]
    assert [taken.id for taken in chosen if taken is not None] == ["evt-a0", "evt-b", "evt-a1"]


def test_owners_that_share_a_host_take_turns(database: Database) -> None:
    owned = {owner: submitted(database) for owner in ("alice", "bob")}
    with database.writing() as session:
        for owner, job_id in owned.items():
            session.execute(update(Job).where(Job.id == job_id).values(owner=owner))
        for number in range(10):
            session.add(due(f"evt-a{number}", owned["alice"], f"http://slow.example/{number}", float(number)))
        session.add(due("evt-b", owned["bob"], "http://slow.example/", 2000.0))
    deliverer = Deliverer(database, signer(SECRET), private_addresses=True)
    chosen = [deliverer._take(), deliverer._take()]
    assert [taken.id for taken in chosen if taken is not None] == ["evt-a0", "evt-b"]


def due(delivery_id: str, job_id: str, url: str, not_before: float) -> Delivery:
    return Delivery(id=delivery_id, job_id=job_id, created_at=1.0, type="t", url=url,
        host=urlsplit(url).hostname, attempts=0,
                    not_before=not_before, outcome=None)  # fmt: skip
