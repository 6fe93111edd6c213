"""Regression tests for the fourteenth attack."""

import os
import time
from pathlib import Path

import pytest

from app.contract.reports import EventLine, Failure
from app.memory_profiles import profiles
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.storage.database import Database
from app.storage.tables import ProfileRequest
from tests.harness.connections import REQUEST, Connections
from tests.harness.log_lines import line
from workers.run_directory import RunDirectory


def test_a_closing_connection_has_a_deadline_whatever_was_requested_after() -> None:
    server = Connections()
    connection, transport = server.open()
    connection.data_received(b"GET / HTTP/1.0\r\nhost: a\r\nconnection: keep-alive\r\n\r\n" + REQUEST)
    first = connection._served
    first.response_complete = True
    transport.close()  # as after the response to HTTP/1.0
    connection.on_response_complete()
    assert connection in connection._waiting()
    server.clock.fire()
    assert transport.aborted


def test_the_head_of_a_pipelined_request_is_not_charged_for_the_body_before_it() -> None:
    connection, transport = Connections().open()
    body = b"a" * 100_000
    connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
    connection.data_received(body + b"GET / HTTP/1.1\r\nho")
    assert not transport.closed
    assert len(connection.cycle.body) == 100_000
    connection.data_received(b"st: a\r\n\r\n")
    assert not transport.closed


def test_a_file_dated_in_the_future_hides_no_sign_of_work(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "model").write_text("weights")
    ahead = time.time_ns() + 3600 * 10**9
    os.utime(tmp_path / "model", ns=(ahead, ahead))
    run.note_work()
    before = run.signs_of_work()
    time.sleep(0.02)
    run.note_work()
    assert run.signs_of_work() != before


def test_names_that_a_trainer_writes_can_be_stored() -> None:
    nul = "a\x00b"
    event = EventLine(attempt=1, time=1.0, type=nul, level="info", message=nul, data={})
    failure = Failure(code=nul, message=nul, permanent=False)
    for text in (event.type, event.message, failure.code, failure.message):
        assert text == "a\N{REPLACEMENT CHARACTER}b"
    norms = type(line(1)).model_validate({**line(1).model_dump(), "gradient_norms": {nul: 1.0}})
    assert norms.gradient_norms == {"a\N{REPLACEMENT CHARACTER}b": 1.0}


def test_a_profile_request_at_work_is_not_forgotten(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_MOST_REQUESTS", 3)

    def want(sequence: int) -> profiles.ProfileKey:
        recipe = profiles.Recipe(device="cpu", precision="fp32")
        wanted = profiles.ProfileKey("a/model", from_config(TINY_GPT2), TINY_GPT2, recipe, sequence)
        with database.writing() as session:
            profiles.request(session, wanted)
        return wanted

    at_work = want(8)
    with database.writing() as session:
        assert profiles.claim(session, {}) is not None
    dropped = want(16)
    for number in range(3, 9):
        want(8 * number)
    with database.reading() as session:
        assert session.get(ProfileRequest, at_work.key) is not None
        assert session.get(ProfileRequest, dropped.key) is None
    (warning,) = profiles.request_warnings(database, dropped) or []
    assert "formula" in warning
