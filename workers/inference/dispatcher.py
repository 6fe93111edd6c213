"""Claims requests, passes each to the engine of its model, and stores the parts of the answers."""

import contextlib
import select
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from app.contract.inference import AnswerPart, InferenceError, InferenceOrder
from app.contract.model_reference import ModelReference
from app.errors import ReplacedDatabase, Unavailable
from app.inference import requests
from app.inference.requests import Claimed
from app.models import base_models
from app.settings import Settings
from app.storage.database import ChangeDetector, Database
from app.storage.disk import remove_tree
from workers import background
from workers.inference import engine_folders
from workers.inference.answer_parts import merged_parts
from workers.inference.engine_process import EngineProcess
from workers.inference.placement import DoesNotFit, Place, Placement, threads_of_cpu
from workers.inference.protocol import AnswerOrder, LoadOrder, Reported
from workers.inference.refusal import refused, unavailable
from workers.trainer_process import device_environment

log = structlog.get_logger("accrue.inference")

MAX_CLAIMED = 256
"""The maximum number of requests that one process works on."""

_STORE_SECONDS = 0.05
"""How often parts are stored: more often, a fast model would keep the disk busy."""
_ACTIVE_SECONDS, _IDLE_SECONDS = 0.005, 0.01
"""How long a turn waits for engines: while requests are answered, and while there are none."""
_CHECK_SECONDS = 1.0
"""How often it is checked whether training needs a GPU, and which engines have nothing to do."""

_PATIENCE_SECONDS = 10.0
"""Seconds that a request waits for its model while others are loaded and busy; then one of them takes no new
requests."""

_GRACE_SECONDS = 10.0
"""How long answers may go on when training needs their GPU."""


@dataclass(eq=False)
class _Open:
    """A request that is being answered."""

    id: str
    key_id: str | None
    attempts: int
    order: InferenceOrder
    parts: deque[AnswerPart] = field(default_factory=deque)
    """Those that are not stored yet."""
    stored: int = 0
    since: float = field(default_factory=time.monotonic)
    """When this process took it."""
    is_over: bool = False
    """Whether the last part has come."""


@dataclass(eq=False)
class _Engine:
    """A model in use."""

    key: str
    name: str
    process: EngineProcess
    place: Place
    folder: Path
    requests: dict[str, _Open] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    """The folders of the adapters that it may read, by fingerprint."""
    unsent: list[AnswerOrder] = field(default_factory=list)
    """What to send once it has loaded the model."""
    is_ready: bool = False
    used_at: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    leaves_at: float | None = None
    """None: it accepts requests. Otherwise it accepts no new ones, and those that it has are interrupted at
    this time of the monotonic clock (infinity: never)."""


class Dispatcher:
    """Runs one turn at a time.

    Args:
        process_id: the name under which requests are claimed.
    """

    def __init__(self, settings: Settings, database: Database, placement: Placement, process_id: str) -> None:
        self._settings, self._database, self._placement = settings, database, placement
        self._process_id = process_id
        self._changes = ChangeDetector(database)
        self._engines: dict[str, _Engine] = {}
        self._open: dict[str, _Open] = {}
        self._waiting: deque[_Open] = deque()
        """Requests that were not passed to an engine yet."""
        self._fetching: dict[str, Future[None]] = {}
        """The fetches of models' files from object storage, by model."""
        self._alone: set[str] = set()
        """Fingerprints of adapters that cannot share their model."""
        self._spare: EngineProcess | None = None
        self._store_at = self._check_at = self._renew_at = 0.0
        self._used_at = time.monotonic()
        engine_folders.remove_abandoned()

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do for so long that this process should end."""
        unused = time.monotonic() > self._used_at + self._settings.inference_idle_seconds
        return unused and not self._open and not self._engines

    def turn(self) -> None:
        """Waits a moment for engines, and does what is due."""
        self._receive(_ACTIVE_SECONDS if self._open else _IDLE_SECONDS)
        now = time.monotonic()
        if now >= self._store_at:
            self._store_at = now + _STORE_SECONDS
            self._store()
        if now >= self._renew_at:
            self._renew_at = now + requests.RENEWAL_SECONDS
            self._renew()
        if self._changes.any() and len(self._open) < MAX_CLAIMED:
            self._claim()
        if now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            self._check(now)
        self._begin_waiting()
        if self._spare is None and not self._engines and not self._open:
            self._spare = self._new_process()  # so that the first answer comes sooner

    def close(self) -> None:
        """Ends all engines; requests that are not answered go to another process."""
        for engine in list(self._engines.values()):
            self._end(engine)
        if self._spare is not None:
            self._spare.kill()
        with (
            contextlib.suppress(OperationalError, ReplacedDatabase),
            self._database.writing() as session,
        ):
            requests.release(session, self._process_id, list(self._open))

    def _claim(self) -> None:
        with self._database.reading() as session:
            if not requests.any_unclaimed(session):
                return
        with self._database.writing() as session:
            claimed = requests.claim(session, self._process_id, MAX_CLAIMED - len(self._open))
        for each in claimed:
            self._used_at = time.monotonic()
            self._accept(each)

    def _accept(self, claimed: Claimed) -> None:
        try:
            order = InferenceOrder.model_validate(claimed.order)
        except ValidationError:  # of another version's service
            log.error("a request cannot be understood", request=claimed.id)  # the error quotes the request
            self._refuse_unread(claimed)
            return
        request = _Open(claimed.id, claimed.key_id, claimed.attempts, order, stored=claimed.parts)
        self._open[request.id] = request
        if claimed.parts or claimed.attempts > requests.MAX_ATTEMPTS:
            self._fail(request, _INTERRUPTED)
        else:
            self._waiting.append(request)

    def _refuse_unread(self, claimed: Claimed) -> None:
        part = AnswerPart(error=unavailable("The worker is of another version than the service.").error)
        with self._database.writing() as session:
            requests.store(session, self._process_id, {(claimed.id, claimed.parts): part})

    def _begin_waiting(self) -> None:
        """Passes requests to engines, as far as these can be started."""
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.id not in self._open:
                continue
            try:
                engine = self._engine_for(request)
                if engine is None:
                    self._waiting.append(request)
                else:
                    self._send(engine, request)
            except DoesNotFit as error:
                self._fail(request, unavailable(f"{error}.").error)
            except Unavailable as error:
                self._fail(request, unavailable(error.message).error)
            except ValueError as error:
                self._fail(request, refused(f"{error}.", field="model").error)
            except OSError as error:
                log.warning("an engine cannot be started", error=str(error))
                self._fail(request, unavailable("The worker cannot start a process for the model.").error)

    def _engine_for(self, request: _Open) -> _Engine | None:
        """The engine of a request's model, started if necessary; None if it has to wait.

        Raises:
            DoesNotFit: no device has enough memory for the model.
            ValueError: the worker cannot find the model's files.
            Unavailable: the object storage that has them cannot be used.
            OSError: the process cannot be started.
        """
        if not self._are_files_here(request.order.model):
            return None
        model = self._model_of(request.order)
        key = model.model_dump_json(exclude={"architecture"})
        engine = self._engines.get(key)
        if engine is not None:
            return engine if engine.leaves_at is None else None
        if self._is_full() and not self._end_unused():
            self._make_room_for(request)
            return None
        while True:
            try:
                place = self._placement.place(model)
                break
            except DoesNotFit:
                if self._end_unused():
                    continue
                if not self._engines:
                    raise
                self._make_room_for(request)
                return None
        try:
            return self._start(key, model, place)
        except (ValueError, OSError, Unavailable):
            place.leave()
            raise

    def _are_files_here(self, model: ModelReference) -> bool:
        """Whether a model's files are on this machine. If object storage has them, fetching is begun in the
        background, so that other requests do not wait for it.

        Raises:
            ValueError, Unavailable: as in `_engine_for`.
        """
        if self._settings.object_storage is None or (model.job_id is None and not model.layers):
            return True
        key = model.model_dump_json(exclude={"architecture"})
        fetching = self._fetching.get(key)
        if fetching is None:
            fetching = background.begin(lambda: self._fetch(model))
            self._fetching[key] = fetching
        if not fetching.done():
            return False
        if fetching.exception() is not None:
            del self._fetching[key]  # another request tries again
        fetching.result()
        return True

    def _fetch(self, model: ModelReference) -> None:
        base_models.path_of(model, self._settings)
        base_models.layer_paths(model, self._settings)

    def _model_of(self, order: InferenceOrder) -> ModelReference:
        """The model that an engine loads for a request."""
        adapter = order.adapter()
        return (
            order.model if adapter is None or adapter.fingerprint in self._alone else order.without_adapter()
        )

    def _is_full(self) -> bool:
        return len(self._engines) >= self._settings.inference_models

    def _end_unused(self) -> bool:
        """Ends the engine that has had nothing to do for the longest time. Returns whether there was one."""
        unused = [engine for engine in self._engines.values() if not engine.requests]
        if not unused:
            return False
        self._end(min(unused, key=lambda engine: engine.used_at))
        return True

    def _make_room_for(self, request: _Open) -> None:
        """Lets a busy engine take no new requests, if a request has waited long for a model of its own."""
        busy = [engine for engine in self._engines.values() if engine.leaves_at is None]
        if len(busy) == len(self._engines) and time.monotonic() > request.since + _PATIENCE_SECONDS:
            min(busy, key=lambda engine: engine.started_at).leaves_at = inf

    def _start(self, key: str, model: ModelReference, place: Place) -> _Engine:
        path = base_models.path_of(model, self._settings)
        if self._spare is not None and not self._spare.is_alive:
            self._spare.kill()
            self._spare = None
        process, self._spare = self._spare or self._new_process(), None
        folder = engine_folders.make()
        hidden = str(self._settings.data_dir.resolve()) if self._settings.trainer_isolation else None
        devices = [] if place.device is None else [place.device]
        process.send(
            LoadOrder(
                model=model,
                path=path,
                layer_paths=base_models.layer_paths(model, self._settings),
                folder=str(engine_folders.staged_in(folder)),
                adapters=str(engine_folders.adapters_in(folder)),
                hidden=hidden,
                environment=device_environment(devices),
                device=place.torch_name,
                threads=threads_of_cpu(self._settings) if place.device is None else None,
            )
        )
        log.info("loading a model, to answer requests", model=model.name, device=place.torch_name)
        engine = self._engines[key] = _Engine(key, model.name, process, place, folder)
        return engine

    def _new_process(self) -> EngineProcess:
        return EngineProcess(device_environment([]), network=self._settings.trainer_network)

    def _send(self, engine: _Engine, request: _Open) -> None:
        engine.used_at = time.monotonic()
        adapter = request.order.adapter()
        path = None
        if adapter is not None and adapter.fingerprint not in self._alone:
            if adapter.fingerprint not in engine.adapters:
                source = Path(base_models.layer_paths(request.order.model, self._settings)[-1])
                copy = engine_folders.copy_into(engine_folders.adapters_in(engine.folder), source)
                engine.adapters[adapter.fingerprint] = str(copy)
            path = engine.adapters[adapter.fingerprint]
        engine.requests[request.id] = request
        order = AnswerOrder(id=request.id, order=request.order, adapter_path=path, key_id=request.key_id)
        if engine.is_ready:
            engine.process.send(order)
        else:
            engine.unsent.append(order)

    def _receive(self, seconds: float) -> None:
        """Takes what engines have sent, and waits for it if they have sent nothing."""
        engines = list(self._engines.values())
        if is_open := [engine.process for engine in engines if engine.process.is_open]:
            select.select(is_open, [], [], seconds)
        else:
            time.sleep(seconds)
        for engine in engines:
            engine.process.send_rest()
            for reported in engine.process.received():
                self._take(engine, reported)
            if not engine.process.is_open and engine.key in self._engines:
                self._lose(engine)

    def _take(self, engine: _Engine, reported: Reported) -> None:
        if reported.ready:
            engine.is_ready = True
            for order in engine.unsent:
                engine.process.send(order)
            engine.unsent = []
        elif reported.failed is not None:
            for each in list(engine.requests.values()):
                self._fail(each, reported.failed)
            self._end(engine)
        elif reported.id is not None and (request := engine.requests.get(reported.id)) is not None:
            if reported.not_shared:
                adapter = request.order.adapter()
                assert adapter is not None
                self._alone.add(adapter.fingerprint)
                del engine.requests[request.id]
                self._waiting.append(request)
            elif reported.part is not None and not request.is_over:
                request.parts.append(reported.part)
                if reported.part.is_last:
                    self._finish(request, engine)

    def _finish(self, request: _Open, engine: _Engine) -> None:
        request.is_over = True
        engine.requests.pop(request.id, None)
        engine.used_at = self._used_at = time.monotonic()
        self._store_at = 0.0  # somebody waits for it

    def _fail(self, request: _Open, error: InferenceError) -> None:
        for engine in self._engines.values():
            engine.requests.pop(request.id, None)
        request.parts.append(AnswerPart(error=error))
        request.is_over = True
        self._store_at = 0.0

    def _store(self) -> None:
        """Stores new parts, in one transaction for all requests."""
        having = [request for request in self._open.values() if request.parts]
        if not having:
            return
        parts = {(request.id, request.stored): merged_parts(list(request.parts)) for request in having}
        with self._database.writing() as session:
            still = requests.store(session, self._process_id, parts)
        for request in having:
            request.parts.clear()
            request.stored += 1
            if request.is_over:
                del self._open[request.id]
            elif request.id not in still:
                self._cancel(request)

    def _renew(self) -> None:
        """Renews the claims, and stops answering requests whose clients have left."""
        if not self._open:
            return
        with self._database.writing() as session:
            still = requests.renew(session, self._process_id, list(self._open))
        for request in [each for each in self._open.values() if each.id not in still]:
            self._cancel(request)

    def _cancel(self, request: _Open) -> None:
        self._open.pop(request.id, None)
        for engine in self._engines.values():
            if engine.requests.pop(request.id, None) is not None:
                if engine.is_ready:
                    engine.process.send(AnswerOrder(id=request.id))
                engine.unsent = [order for order in engine.unsent if order.id != request.id]

    def _check(self, now: float) -> None:
        """Ends engines that have had nothing to do, or whose GPU training needs."""
        with self._database.reading() as session:
            is_any_abandoned = requests.any_abandoned(session)
        if is_any_abandoned:
            with self._database.writing() as session:
                requests.delete_abandoned(session)
        wanted = self._settings.inference_yields and any(
            engine.place.device is not None for engine in self._engines.values()
        )
        wanted = wanted and self._placement.training_needs_gpus()
        for engine in list(self._engines.values()):
            if wanted and engine.place.device is not None and engine.leaves_at in (None, inf):
                engine.leaves_at = now + _GRACE_SECONDS
            if engine.requests:
                if engine.leaves_at is not None and now > engine.leaves_at:
                    self._interrupt(engine, _PREEMPTED)
            elif engine.leaves_at is not None or now > engine.used_at + self._settings.inference_idle_seconds:
                self._end(engine)

    def _lose(self, engine: _Engine) -> None:
        """Handles the end of an engine's process."""
        log.warning("the process of a model ended", model=engine.name, requests=len(engine.requests))
        self._interrupt(engine, _INTERRUPTED)

    def _interrupt(self, engine: _Engine, why: InferenceError) -> None:
        """Ends an engine, and answers its requests again; those of which parts were already made, and
        those that were begun too often, end with the reason `why`."""
        interrupted = list(engine.requests.values())
        self._end(engine)
        for request in interrupted:
            request.attempts += 1
            if request.stored or request.parts or request.attempts > requests.MAX_ATTEMPTS:
                self._fail(request, why)
            else:
                self._waiting.append(request)

    def _end(self, engine: _Engine) -> None:
        log.info("model is unloaded", model=engine.name)
        engine.process.kill()
        engine.place.leave()
        self._engines.pop(engine.key, None)
        remove_tree(engine.folder)


_INTERRUPTED = unavailable("The process that was answering has ended: send the request again.").error
_PREEMPTED = unavailable("Training needed the GPU that the model was using: send the request again.").error
