"""What a poll for new events reads."""

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection

from app.jobs import lifecycle
from app.storage.database import Database
from app.web.event_stream import EventStream
from tests.harness.submissions import submitted


@pytest.mark.parametrize("statement", [1, 2])
def test_a_stream_ends_with_the_job_s_last_event_even_if_the_job_ends_while_it_is_read(
    database: Database, statement: int
) -> None:
    """On PostgreSQL each statement sees what is committed by then."""
    job = submitted(database)
    stream = EventStream(database)
    follower = stream.join(job)
    found, over = stream._new_events([follower])
    follower.last = found[0][-1].id
    assert not over
    run = 0

    def end_the_job(connection: Connection, *_: object) -> None:
        nonlocal run
        run += 1
        if run == statement:
            with database.writing() as session:
                lifecycle.cancel(session, job)

    event.listen(database.engine, "after_cursor_execute", end_the_job)
    events = []
    for _ in range(3):
        found, over = stream._new_events([follower])
        events += [each.type for each in found.get(0, [])]
        if over:
            break
        if found:
            follower.last = found[0][-1].id
    assert events[-1:] == ["cancelled"]


def test_clients_that_have_read_as_much_of_a_job_are_looked_up_once(database: Database) -> None:
    first, second = submitted(database), submitted(database)
    stream = EventStream(database)
    followers = [stream.join(first) for _ in range(20)] + [stream.join(second)]
    found, over = stream._new_events(followers)
    assert sorted(found) == list(range(21))
    assert {each.job_id for number in range(20) for each in found[number]} == {first}
    for number, follower in enumerate(followers):
        follower.last = found[number][-1].id
    with database.writing() as session:
        lifecycle.cancel(session, first)
    looked_up: list[int] = []

    def note(_: Connection, __: object, ___: str, parameters: object, *____: object) -> None:
        assert isinstance(parameters, dict | tuple)
        looked_up.append(len(parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    found, over = stream._new_events(followers)
    assert max(looked_up) <= 2 * 3 + 4  # a number, a job and an event for each of two, and the conditions'
    assert (sorted(found), over) == (list(range(20)), [])
    for number in range(20):
        followers[number].last = found[number][-1].id
    assert stream._new_events(followers) == ({}, list(range(20)))
