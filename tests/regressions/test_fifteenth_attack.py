"""Regression tests for the fifteenth attack."""

import asyncio

import pytest

from app.jobs import lifecycle, transitions
from app.storage.database import Database
from tests.harness.claims import claim
from tests.harness.connections import REQUEST, Connections
from tests.harness.submissions import submitted

HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n"


def test_a_locked_job_is_the_job_as_it_is_now(database: Database) -> None:
    """Even if the session has read it before, so that a cancellation in between is not lost."""
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time")
    job_id = submitted(database)
    assert claim(database) is not None
    with database.writing() as session:
        lifecycle.pause(session, job_id)
    with database.writing() as session:
        assert transitions.get(session, job_id).requested == "pause"
        with database.writing() as other:
            lifecycle.cancel(other, job_id)
        assert transitions.get(session, job_id, lock=True).requested == "cancel"


def test_a_body_that_a_route_does_not_read_is_received() -> None:
    connection, transport = Connections().open()
    connection.data_received(HEAD)
    Connections.answer(Connections(), connection)
    for _ in range(10):
        connection.data_received(b"a" * 10_000)
    assert not transport.closed
    assert transport.unread == 0, "no second answer"
    connection.data_received(REQUEST)
    assert not transport.closed


def test_the_first_segment_may_hold_a_request_and_a_part_of_the_next_head() -> None:
    connection, transport = Connections().open()
    connection.data_received(HEAD + b"a" * 100_000 + b"GET / HTTP/1.1\r\nho")
    assert not transport.closed
    assert len(connection.cycle.body) == 100_000


def test_an_endless_head_after_a_body_is_cut_off() -> None:
    connection, transport = Connections().open()
    connection.data_received(HEAD + b"a" * 100_000 + b"GET / HTTP/1.1\r\nho")
    for _ in range(20):
        connection.data_received(b"a" * 10_000)
    assert transport.closed


def test_a_connection_whose_response_breaks_off_has_a_deadline() -> None:
    server = Connections()
    connection, transport = server.open()
    connection.data_received(REQUEST)
    transport.close()  # as uvicorn does if the application fails in the middle of a response
    connection._note_end()
    assert connection in connection._waiting()
    server.clock.fire()
    assert transport.aborted
    connection.connection_lost(None)
    connection._note_end()
    assert connection not in connection._waiting()


def test_every_request_s_end_is_noted() -> None:
    async def failing(scope: object, receive: object, send: object) -> None:
        raise OSError

    async def run() -> None:
        connection, transport = Connections().open()
        noted = asyncio.Event()
        connection.loop = asyncio.get_running_loop()
        connection._note_end = noted.set
        connection.app = failing
        connection.data_received(REQUEST)
        await asyncio.wait_for(noted.wait(), 30)
        transport.close()

    asyncio.run(run())
