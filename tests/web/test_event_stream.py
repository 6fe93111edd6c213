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
