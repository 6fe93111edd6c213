"""A submission on its way to the database: with others, or alone where it takes a while."""

from collections.abc import Callable

from anyio import to_thread
from fastapi import Request, Response
from pydantic import BaseModel

from app.contract.fail_points import fail_point
from app.storage.database import Database
from app.storage.group_commit import GroupCommit
from app.storage.session import Session
from app.storage.tables import Job
from app.submissions import admission
from app.submissions.admission import Checked
from app.submissions.idempotency import IdempotentRequest


async def submitted(
    request: Request,
    database: Database,
    once: IdempotentRequest,
    check: Callable[[], Checked],
    answer: Callable[[Session, Job], BaseModel],
    *,
    alone: bool,
    status: int = 200,
) -> Response:
    """The answer, once the job is durable.

    Args:
        database: as the caller sees it.
        check: raises where there is nothing to store.
        alone: in a thread of its own, so that other submissions do not wait for it.
    """

    def store(checked: Checked, database: Database) -> Response:
        made = admission.store(checked, database, request.app.state.settings, once, answer, status)
        return made if isinstance(made, Response) else as_json(made, status)

    if alone:
        response = await to_thread.run_sync(lambda: store(check(), database))
    else:
        group: GroupCommit = request.app.state.group_commit
        response = await group.write(database, check, store)
    fail_point("service.committed")
    return response


def as_json(answer: BaseModel, status: int) -> Response:
    return Response(answer.model_dump_json(), status, media_type="application/json")
