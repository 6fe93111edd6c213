"""How long the service keeps connections open."""

from app.web.http_connections import HEADER_SECONDS, IDLE_SECONDS
from tests.harness.connections import REQUEST, Connections


def _timers(connections: Connections) -> list[float]:
    """The seconds of all timers that are set."""
    return [timer.seconds for timer in connections.clock.timers if not timer.cancelled]


def test_an_idle_connection_stays_open_longer_than_clients_and_proxies_keep_theirs() -> None:
    connections = Connections()
    connection, transport = connections.open()
    connection.data_received(REQUEST)
    connections.answer(connection)
    assert set(_timers(connections)) == {IDLE_SECONDS}
    assert IDLE_SECONDS > 60  # nginx, and the load balancers of AWS
    connections.clock.fire()
    assert transport.closed


def test_the_next_request_s_head_has_no_more_time_than_the_first_one_s() -> None:
    connections = Connections()
    connection, transport = connections.open()
    assert _timers(connections) == [HEADER_SECONDS]
    connection.data_received(REQUEST)
    connections.answer(connection)
    connection.data_received(REQUEST[:10])
    assert _timers(connections) == [HEADER_SECONDS]
    connections.clock.fire()
    assert transport.closed
