"""Dependencies of routes: the caller, settings, the database and its sessions.

Dependencies that never block are coroutines: FastAPI would run a plain function in a thread, which takes
longer than the function itself.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from anyio import to_thread
from fastapi import Depends, Header, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from app.errors import Forbidden
from app.planning.inputs import PlanningInputs
from app.security.authentication import admit
from app.security.keys import Caller
from app.security.scopes import Scope, lacks_scope
from app.settings import Settings
from app.storage.database import Database
from app.storage.session import Session, Viewer
from app.submissions.idempotency import IdempotentRequest
from app.web.concurrency import SlowWork, ThreadTurns, in_turns
from app.web.content_type import is_multipart
from app.web.middleware import CALCULATORS
from app.web.query_parameters import check_names

Result = TypeVar("Result")


class RunSlowly(Protocol):
    """Runs work that may take seconds (`SlowWork.run`)."""

    def __call__(self, work: Callable[[], Result]) -> Awaitable[Result]: ...


SendStream = Callable[..., Response]
SendFile = Callable[..., Response]


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _caller(request: Request) -> Caller:
    """The caller, if the request is allowed. `app/web/openapi.py` documents the key: a security scheme of
    FastAPI would be one more dependency of every request, and would parse the key a second time.

    Raises:
        Unauthorized: the request has no valid key.
        Forbidden: the key lacks the scope for this request.
    """
    caller = await admit(request)
    if request.scope["query_string"]:
        check_names(request)
    needed: Scope = "read" if request.method in ("GET", "HEAD") or _changes_nothing(request) else "write"
    if not caller.may(needed):
        raise Forbidden(lacks_scope(needed))
    return caller


def _changes_nothing(request: Request) -> bool:
    tags: list[str] = getattr(request.scope.get("route"), "tags", [])
    return CALCULATORS in tags


async def _whole_database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


async def _database(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> Database:
    return _database_for(request, caller)


def planning_inputs_of(request: Request) -> PlanningInputs:
    """The planning inputs that the caller of an authorised request may see."""
    return PlanningInputs(_database_for(request, request.state.caller), request.app.state.planning_cache)


def _database_for(request: Request, caller: Caller) -> Database:
    whole: Database = request.app.state.database
    return whole.seen_by(Viewer(caller.owner, creator=caller.key_id))


async def _idempotent_request(
    request: Request,
    caller: Annotated[Caller, Depends(_caller)],
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            description="A request repeated with the same key within a day is carried out only once",
        ),
    ] = None,
) -> IdempotentRequest:
    digest = hashlib.sha256(f"{request.method} {request.scope['path']}\n".encode())
    if not is_multipart(request.headers):
        digest.update(await request.body())
    return IdempotentRequest(idempotency_key, caller.key_id or "", digest.digest())


OpenSession = Callable[[], AbstractContextManager[Session]]


async def _reading(database: Annotated[Database, Depends(_database)]) -> OpenSession:
    return database.reading


async def _writing(database: Annotated[Database, Depends(_database)]) -> OpenSession:
    return database.writing


async def _slowly(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> RunSlowly:
    return slowly_of(request)


def slowly_of(request: Request) -> RunSlowly:
    """Runs work that may take seconds, for the caller of an authorised request."""
    slow: SlowWork = request.app.state.slow_work
    return partial(slow.run, request.state.caller.key_id)


async def _listing(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> RunSlowly:
    lists: SlowWork = request.app.state.list_work
    return partial(lists.run, caller.key_id)


async def _answering_with_results(
    request: Request, caller: Annotated[Caller, Depends(_caller)]
) -> Callable[[Callable[[], BaseModel]], Awaitable[Response]]:
    results: SlowWork = request.app.state.result_work

    async def answer(read: Callable[[], BaseModel]) -> Response:
        content = await results.run(caller.key_id, lambda: read().model_dump_json())
        return Response(content, media_type="application/json")

    return answer


async def _streaming_results(
    request: Request, caller: Annotated[Caller, Depends(_caller)]
) -> Callable[[Iterator[Result]], AsyncIterator[Result]]:
    results: SlowWork = request.app.state.result_work
    return partial(in_turns, partial(results.go_on, caller.key_id))


async def _fetching(
    settings: Annotated[Settings, Depends(_settings)], slowly: Annotated[RunSlowly, Depends(_slowly)]
) -> RunSlowly:
    return slowly if settings.object_storage is not None else in_thread


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs work that takes milliseconds in a thread, as FastAPI runs endpoints that are no coroutines."""
    return await to_thread.run_sync(work)


async def own_turn(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> AsyncIterator[None]:
    """Waits for a turn of the caller's key among the threads that all requests share."""
    turns: ThreadTurns = request.app.state.thread_turns
    own = turns.reads if request.method in ("GET", "HEAD") else turns.writes
    async with own.turn(caller.key_id):
        yield


async def _in_turn(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> RunSlowly:
    turns: ThreadTurns = request.app.state.thread_turns
    return partial(turns.read, caller.key_id)


async def _stream(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> SendStream:
    return partial(request.app.state.downloads.stream, caller.key_id)


async def _file(request: Request, caller: Annotated[Caller, Depends(_caller)]) -> SendFile:
    return partial(request.app.state.downloads.file, caller.key_id)


Slowly = Annotated[RunSlowly, Depends(_slowly)]
"""Runs work that may take seconds in a thread; called with the work, as `SlowWork.run`."""
InTurn = Annotated[RunSlowly, Depends(_in_turn)]
"""Runs work that takes milliseconds in one of the threads that all requests share, of which each key has a
few."""
Listing = Annotated[RunSlowly, Depends(_listing)]
"""Runs the query of a list that may read all rows of a key. Lists have threads of their own, so that they do
not wait for uploads and other slow requests."""
ResultsAnswer = Annotated[
    Callable[[Callable[[], BaseModel]], Awaitable[Response]], Depends(_answering_with_results)
]
"""Responds with what a job's trainer wrote; called with the work that reads it. This may be large, so it is
read, and written as JSON, in threads of its own."""
ResultsInTurns = Annotated[Callable[[Iterator[Any]], AsyncIterator[Any]], Depends(_streaming_results)]
"""Makes each part of a stream of such content in these threads, when it is the key's turn."""
Fetching = Annotated[RunSlowly, Depends(_fetching)]
"""Runs work that opens stored files in a thread: among the slow requests, if they may have to be fetched."""
StreamOf = Annotated[SendStream, Depends(_stream)]
"""Responds with a stream; called with `(parts, close, **options)`, as `Downloads.stream`."""
FileOf = Annotated[SendFile, Depends(_file)]
"""Responds with an open file; called with `(file, **options)`, as `Downloads.file`."""

CurrentCaller = Annotated[Caller, Depends(_caller)]
authorised = Depends(_caller)
"""A dependency of every router except those that need no key, such as the health checks."""

CurrentSettings = Annotated[Settings, Depends(_settings)]
WholeDatabase = Annotated[Database, Depends(_whole_database)]
"""For the few routes that need no key, and show nothing that belongs to one."""

CurrentDatabase = Annotated[Database, Depends(_database)]
Reading = Annotated[Session, Depends(_reading)]
"""A session for queries; only for the endpoints of a `SessionRoute`, which opens it."""
Writing = Annotated[Session, Depends(_writing)]
"""A session that is committed before the response is sent; only for the endpoints of a `SessionRoute`."""
CurrentIdempotentRequest = Annotated[IdempotentRequest, Depends(_idempotent_request)]
Limit = Annotated[int, Query(ge=1, le=100, description="Maximum number of items")]


def _id_after(start: str) -> Any:
    """A parameter for the end of the page before, in a list whose ids have this start. Ids are compared as
    text, so another text would silently give an empty page, or the first one again."""
    described = "The last_id of the page before"
    return Query(max_length=100, pattern=f"^{start}", description=described, examples=[f"{start}…"])


AfterJob = Annotated[str | None, _id_after("ftjob-")]
AfterFile = Annotated[str | None, _id_after("file-")]
AfterEvent = Annotated[str | None, _id_after("ftevent-")]
AfterCheckpoint = Annotated[str | None, _id_after("ftckpt-")]
AfterConfiguration = Annotated[str | None, _id_after("accumulation_")]
AfterProfile = Annotated[str | None, _id_after("profile-")]
AfterAuditEntry = Annotated[str | None, _id_after("audit-")]


JobId = Annotated[str, Path(max_length=100, description="ftjob-…")]
