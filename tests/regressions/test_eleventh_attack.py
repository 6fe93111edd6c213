"""Regression tests for the eleventh attack."""

from app.web import http_connections
from tests.harness.connections import REQUEST, Connections


def test_a_client_that_sends_more_requests_but_reads_nothing_can_be_replaced() -> None:
    server = Connections(most=4 + http_connections.ENDING)
    stalled, transport = server.open()
    stalled.data_received(REQUEST)
    transport.write(bytes(2**20))
    stalled.pause_writing()
    stalled.data_received(REQUEST)
    for _ in range(2):
        working, _ = server.open()
        working.data_received(REQUEST)
    server.open()
    assert transport.aborted


def test_a_client_that_has_read_its_response_late_can_be_replaced() -> None:
    server = Connections(most=4 + http_connections.ENDING)
    idle, transport = server.open()
    idle.data_received(REQUEST)
    idle.pause_writing()
    server.answer(idle)
    idle.resume_writing()
    for _ in range(2):
        working, _ = server.open()
        working.data_received(REQUEST)
    server.open()
    assert transport.aborted
