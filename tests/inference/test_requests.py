"""Requests for answers as rows: claimed by one process, renewed, stored in parts, and deleted."""

import pytest
from sqlalchemy import delete, update

from app.contract.architecture import BUILT_IN_MODEL
from app.contract.inference import AnswerPart, ChoiceDelta, InferenceError, InferenceOrder, Usage
from app.contract.model_reference import ModelReference
from app.errors import Conflict
from app.inference import requests
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.storage.database import Database, database_now
from app.storage.tables import InferenceRequest, Worker

ORDER = InferenceOrder(
    model=ModelReference(name=BUILT_IN_MODEL, source="built_in", architecture=from_config(TINY_GPT2)),
    prompts=("one",),
)
PART = AnswerPart(deltas=(ChoiceDelta(index=0, text="two"),))
LAST = AnswerPart(usage=Usage(prompt_tokens=1, completion_tokens=1))


@pytest.fixture
def worked(database: Database) -> Database:
    """A database in which a worker is alive."""
    with database.writing() as session:
        worker = {"hostname": "h", "started_at": database_now(), "devices": [], "running": []}
        session.add(Worker(id="worker-1", heartbeat_at=database_now(), **worker))
    return database


def claimed(database: Database, process: str = "p") -> list[str]:
    with database.writing() as session:
        return [each.id for each in requests.claim(session, process, 10)]


def stored(database: Database, request_id: str, number: int, part: AnswerPart, process: str = "p") -> bool:
    with database.writing() as session:
        return request_id in requests.store(session, process, {(request_id, number): part})


def parts(database: Database, request_id: str, read: int = 0) -> list[AnswerPart]:
    with database.reading() as session:
        rows = requests.new_parts(session, {request_id: read})
    return [AnswerPart.model_validate(content) for _, _, content in rows]


def test_a_request_is_claimed_once_oldest_first(worked: Database) -> None:
    made = [requests.add(worked, ORDER, "key-1") for _ in range(3)]
    with worked.writing() as session:
        first = requests.claim(session, "p", 2)
    assert [each.id for each in first] == made[:2]
    assert InferenceOrder.model_validate(first[0].order) == ORDER
    assert claimed(worked, "q") == made[2:]
    assert claimed(worked) == []


def test_without_a_worker_nothing_is_stored(database: Database) -> None:
    with pytest.raises(Conflict, match="accrue worker"):
        requests.add(database, ORDER, None)


def test_a_silent_process_loses_its_claim(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    assert claimed(worked) == [request_id]
    with worked.writing() as session:
        before = database_now() - requests.CLAIM_SECONDS - 1
        session.execute(update(InferenceRequest).values(claimed_at=before))
    with worked.writing() as session:
        (again,) = requests.claim(session, "q", 10)
        assert (again.id, again.attempts, again.parts) == (request_id, 2, 0)
        assert requests.renew(session, "p", [request_id]) == set()
        assert requests.renew(session, "q", [request_id]) == {request_id}
    assert not stored(worked, request_id, 0, PART)
    assert parts(worked, request_id) == []


def test_parts_are_read_in_order_and_once(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    claimed(worked)
    assert stored(worked, request_id, 0, PART)
    assert stored(worked, request_id, 1, LAST)
    assert parts(worked, request_id) == [PART, LAST]
    assert parts(worked, request_id, read=1) == [LAST]
    assert LAST.is_last
    assert not PART.is_last


def test_a_deleted_request_takes_no_parts(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    claimed(worked)
    stored(worked, request_id, 0, PART)
    requests.forget(worked, request_id)
    assert not stored(worked, request_id, 1, PART)
    with worked.writing() as session:
        assert requests.renew(session, "p", [request_id]) == set()
        assert requests.unclaimed(session, [request_id]) == (set(), set())
    assert parts(worked, request_id) == []


def test_a_released_request_is_free_at_once(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    claimed(worked)
    with worked.writing() as session:
        assert not requests.any_unclaimed(session)
        requests.release(session, "p", [request_id])
        assert requests.any_unclaimed(session)
        (again,) = requests.claim(session, "q", 10)
    assert again.attempts == 1


def test_requests_that_nobody_awaits_are_deleted(worked: Database) -> None:
    old, kept = requests.add(worked, ORDER, None), requests.add(worked, ORDER, None)
    with worked.writing() as session:
        assert not requests.any_abandoned(session)
        session.execute(update(InferenceRequest).values(awaited_at=database_now() - 40))
        requests.keep_awaiting(session, [kept])
    assert claimed(worked) == [kept]
    with worked.reading() as session:
        assert requests.any_abandoned(session)
    new = requests.add(worked, ORDER, None)
    with worked.reading() as session:
        assert requests.unclaimed(session, [old, kept, new]) == ({kept, new}, {new})


def test_unstorable_characters_are_replaced(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    claimed(worked)
    part = AnswerPart(deltas=(ChoiceDelta(index=0, text="a\0b"),), error=None)
    assert stored(worked, request_id, 0, part)
    (found,) = parts(worked, request_id)
    assert "\0" not in found.deltas[0].text
    failed = AnswerPart(error=InferenceError(status=400, code="c", message="m"))
    assert stored(worked, request_id, 1, failed)
    assert parts(worked, request_id, read=1) == [failed]


def test_an_answer_outlives_no_request(worked: Database) -> None:
    request_id = requests.add(worked, ORDER, None)
    claimed(worked)
    stored(worked, request_id, 0, PART)
    with worked.writing() as session:
        session.execute(delete(InferenceRequest))
    assert parts(worked, request_id) == []
