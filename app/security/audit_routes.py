"""The audit log, for admins."""

from typing import Annotated

from fastapi import Query
from sqlalchemy import select

from app.contract.base import Page
from app.errors import Forbidden
from app.observability.schemas import AuditResponse
from app.storage.tables import AuditEntry
from app.web.dependencies import AfterAuditEntry, CurrentCaller, Limit, Reading
from app.web.pagination import page
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router(tags=["audit"], route_class=SessionRoute)


@router.get("/audit", summary="Who changed what, newest first")
def list_audit(
    session: Reading,
    caller: CurrentCaller,
    limit: Limit = 20,
    after: AfterAuditEntry = None,
    key_id: Annotated[str | None, Query(max_length=100, description="Only requests with this key")] = None,
) -> Page[AuditResponse]:
    """Requests that may change something, and refused ones (401, 403); with `ACCRUE_AUDIT_READS`, all others
    too. Of requests with a status from 400 to 499, at most a hundred a minute are kept for each key, and a
    hundred a minute for all without a valid key. Requires the scope admin."""
    if not caller.may("admin"):
        raise Forbidden("The audit log is for keys with the scope admin.")
    query = select(AuditEntry)
    if key_id is not None:
        query = query.where(AuditEntry.key_id == key_id)
    return page(session, query, AuditEntry.id, limit, after, _answer)


def _answer(row: AuditEntry) -> AuditResponse:
    return AuditResponse(
        id=row.id, at=row.at, key_id=row.key_id, method=row.method, path=row.path,
        status=row.status, address=row.address, request_id=row.request_id,
    )  # fmt: skip
