"""The dispatcher with processes that do not do what they should."""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.contract.architecture import BUILT_IN_MODEL
from app.contract.inference import AnswerPart, ChoiceDelta, InferenceOrder, Usage
from app.contract.model_reference import ModelReference
from app.inference import requests
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import InferenceRequest, Worker
from workers.device_locks import DeviceLocks
from workers.inference import dispatcher as module
from workers.inference import engine_folders
from workers.inference.dispatcher import Dispatcher
from workers.inference.placement import Placement
from workers.inference.protocol import AnswerOrder, LoadOrder, Reported
from workers.slots import Slots

USAGE = Usage(prompt_tokens=1, completion_tokens=1)


class Process:
    """Stands in for an engine's process. `behaviour` decides what it sends when it is given an order."""

    behaviour: Any = None
    started: int = 0

    def __init__(self, environment: Mapping[str, str], *, network: bool = True) -> None:
        self._own, self._theirs = socket.socketpair()
        self.is_open = self.is_alive = True
        self._answers: list[Reported] = []
        type(self).started += 1

    def fileno(self) -> int:
        return self._own.fileno()

    def send(self, order: LoadOrder | AnswerOrder) -> None:
        for each in type(self).behaviour(self, order):
            self._answers.append(each)
            self._theirs.send(b".")

    def send_rest(self) -> None:
        pass

    def received(self) -> Iterator[Reported]:
        if self._answers:
            self._own.recv(100)
        while self._answers:
            yield self._answers.pop(0)

    def kill(self) -> None:
        self.is_open = self.is_alive = False
        self._own.close()
        self._theirs.close()


@pytest.fixture
def dispatcher(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Dispatcher]:
    with database.writing() as session:
        worker = {"hostname": "h", "started_at": database_now(), "devices": [], "running": []}
        session.add(Worker(id="worker-1", heartbeat_at=database_now(), **worker))
    monkeypatch.setattr(module, "EngineProcess", Process)
    monkeypatch.setattr(Process, "started", 0)
    placement = Placement(settings, DeviceLocks(settings), Slots(on_cpu=True), lambda: False)
    dispatcher = Dispatcher(settings, database, placement, "p")
    yield dispatcher
    dispatcher.close()


def order(name: str = BUILT_IN_MODEL, text: str = "one") -> InferenceOrder:
    reference = ModelReference(name=name, source="built_in", architecture=from_config(TINY_GPT2))
    return InferenceOrder(model=reference, prompts=(text,))


def answer_of(database: Database, request_id: str) -> list[AnswerPart]:
    with database.reading() as session:
        return [
            AnswerPart.model_validate(content)
            for _, _, content in requests.new_parts(session, {request_id: 0})
        ]


def turns(dispatcher: Dispatcher, database: Database, request_id: str, most: int = 200) -> AnswerPart:
    """Runs turns until the request has its last part, which is returned."""
    for _ in range(most):
        dispatcher.turn()
        parts = answer_of(database, request_id)
        if parts and parts[-1].is_last:
            return parts[-1]
    raise AssertionError("no answer")


def answers(process: Process, given: LoadOrder | AnswerOrder) -> Iterator[Reported]:
    if isinstance(given, LoadOrder):
        yield Reported(ready=True)
    elif given.order is not None:
        part = AnswerPart(deltas=(ChoiceDelta(index=0, text="ok", finish_reason="stop"),), usage=USAGE)
        yield Reported(id=given.id, part=part)


def test_a_request_is_passed_on_and_answered(
    dispatcher: Dispatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "behaviour", staticmethod(answers))
    request_id = requests.add(database, order(), None)
    assert turns(dispatcher, database, request_id).usage == USAGE


def test_a_process_that_dies_as_it_is_given_an_order_is_replaced(
    dispatcher: Dispatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is noticed while sending: nothing more is received."""

    def dies_once(process: Process, given: LoadOrder | AnswerOrder) -> Iterator[Reported]:
        if Process.started == 1:
            process.is_open = process.is_alive = False
        else:
            yield from answers(process, given)

    monkeypatch.setattr(Process, "behaviour", staticmethod(dies_once))
    request_id = requests.add(database, order(), None)
    assert turns(dispatcher, database, request_id).usage == USAGE


def test_a_request_that_ends_each_process_is_given_up(
    dispatcher: Dispatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(process: Process, given: LoadOrder | AnswerOrder) -> Iterator[Reported]:
        if isinstance(given, LoadOrder):
            yield Reported(ready=True)
        else:
            process.is_open = process.is_alive = False

    monkeypatch.setattr(Process, "behaviour", staticmethod(dies))
    request_id = requests.add(database, order(), None)
    error = turns(dispatcher, database, request_id).error
    assert error is not None
    assert error.status == 503


def test_a_spare_process_that_has_ended_is_not_used(
    dispatcher: Dispatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "behaviour", staticmethod(answers))
    dispatcher.turn()  # prepares a process
    assert isinstance(dispatcher._spare, Process)
    dispatcher._spare.is_alive = False
    request_id = requests.add(database, order(), None)
    assert turns(dispatcher, database, request_id).usage == USAGE
    assert Process.started >= 2


def test_a_third_model_gets_its_turn(
    dispatcher: Dispatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models never stop being asked."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)
    pending: list[tuple[Process, AnswerOrder]] = []

    def one_late(process: Process, given: LoadOrder | AnswerOrder) -> Iterator[Reported]:
        """Each request is answered once the next one has come."""
        if isinstance(given, LoadOrder):
            yield Reported(ready=True)
        elif given.order is not None and given.order.model.name == "third":
            yield from answers(process, given)
        elif given.order is not None:
            late = [each for own, each in pending if own is process]
            pending[:] = [each for each in pending if each[0] is not process] + [(process, given)]
            for each in late:
                yield from answers(process, each)

    monkeypatch.setattr(Process, "behaviour", staticmethod(one_late))
    third = None
    for number in range(400):
        if number % 5 == 0:
            for name in ("first", "second"):
                requests.add(database, order(name, str(number)), None)
        if number == 20:
            third = requests.add(database, order("third"), None)
        dispatcher.turn()
        if third is not None and any(part.is_last for part in answer_of(database, third)):
            return
        for own, each in list(pending):  # those of an engine that takes no new requests end
            engine = next((e for e in dispatcher._engines.values() if e.process is own), None)
            if engine is not None and engine.leaves_at is not None:
                own._answers += answers(own, each)
                own._theirs.send(b".")
                pending.remove((own, each))
    raise AssertionError("the third model was never loaded")


def test_adapters_are_copied_so_that_an_engine_cannot_change_a_job_s_model(tmp_path: Path) -> None:
    source, engine = tmp_path / "model", tmp_path / "engine"
    source.mkdir()
    engine.mkdir()
    (source / "adapter_model.safetensors").write_bytes(b"weights")
    (source / "link").symlink_to("/etc/passwd")
    target = engine_folders.copy_into(engine, source)
    assert [path.name for path in target.iterdir()] == ["adapter_model.safetensors"]
    (target / "adapter_model.safetensors").write_bytes(b"changed")
    assert (source / "adapter_model.safetensors").read_bytes() == b"weights"


def test_what_a_user_wrote_is_in_no_log(
    dispatcher: Dispatcher, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    request_id = requests.add(database, order(text="a-secret"), None)
    with database.writing() as session:
        row = session.get_one(InferenceRequest, request_id)
        row.order = {**row.order, "unknown": "a-secret"}
    dispatcher.turn()
    (part,) = answer_of(database, request_id)
    assert part.error is not None
    assert "version" in part.error.message
    printed = capsys.readouterr()
    assert "a-secret" not in printed.out + printed.err


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, own, other = (
        tmp_path / f"accrue-inference-{name}" for name in ("999999999-a", f"{os.getpid()}-b", "x")
    )
    for folder in (left, own, other):
        folder.mkdir()
    engine_folders.remove_abandoned()
    assert (left.exists(), own.exists(), other.exists()) == (False, True, True)
