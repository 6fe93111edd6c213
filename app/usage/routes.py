"""The usage report, as JSON or CSV."""

import csv
import datetime
import io
from collections.abc import Iterable
from typing import Annotated, Literal

from fastapi import Query, Response
from sqlalchemy import select

from app.errors import Unprocessable
from app.storage.database import database_now
from app.storage.session import Session
from app.storage.tables import Key
from app.usage import quotas, records
from app.usage.records import NO_KEY, month_of
from app.usage.schemas import QuotaResponse, UsageOfDay, UsageResponse
from app.web.dependencies import CurrentCaller, Reading
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router(tags=["statistics"], route_class=SessionRoute)

_MOST_DAYS = 366


@router.get(
    "/usage",
    summary="Device hours by key and day",
    response_model=UsageResponse,
    responses={200: {"content": {"text/csv": {}}, "description": "Usage; or, with format=csv, a table"}},
)
def usage(
    session: Reading,
    caller: CurrentCaller,
    first: Annotated[
        datetime.date | None, Query(description="The first day, in UTC; null: the first of this month")
    ] = None,
    last: Annotated[datetime.date | None, Query(description="The last day, in UTC; null: today")] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",
) -> UsageResponse | Response:
    """A key sees its own usage; a key with the scope admin sees that of all keys. Usage is kept when jobs are
    deleted; running attempts count once they end."""
    now = session.scalar(select(database_now())) or 0.0
    today = datetime.datetime.fromtimestamp(now, datetime.UTC).date()
    last = last or today
    first = first or min(month_of(now)[0], last)
    if not datetime.timedelta(0) <= last - first < datetime.timedelta(days=_MOST_DAYS):
        raise Unprocessable(
            f"first {first} must not be after last {last}, and at most {_MOST_DAYS} days may be requested.",
            field="first",
        )
    rows = records.between(session, caller.owner, first, last)
    names = _names(session, {row.owner for row in rows})
    days = [
        UsageOfDay(
            key_id=row.owner or None,
            key_name=names.get(row.owner),
            day=row.day,
            device_hours=row.device_seconds / 3600,
            attempts=row.attempts,
        )
        for row in rows
    ]
    if format == "csv":
        return Response(_table(days), media_type="text/csv")
    return UsageResponse(
        first=first,
        last=last,
        device_hours=sum(row.device_seconds for row in rows) / 3600,
        data=days,
        quotas=[
            QuotaResponse(
                key_id=quota.key_id,
                key_name=quota.name,
                device_hours=quota.hours,
                used_device_hours=quota.used_hours,
                renews_on=quota.renews,
            )
            for quota in quotas.all_quotas(session, caller.owner)
        ],
    )


def _names(session: Session, ids: Iterable[str]) -> dict[str, str]:
    query = select(Key.id, Key.name).where(Key.id.in_([each for each in ids if each != NO_KEY]))
    return dict(session.execute(query).all())


def _table(days: Iterable[UsageOfDay]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(UsageOfDay.model_fields)
    for each in days:
        name = each.key_name or ""
        # A spreadsheet would take a name that begins so for a formula.
        name = f"'{name}" if name[:1] in ("=", "+", "-", "@") else name
        rows.writerow(
            [each.key_id or "", name, each.day.isoformat(), f"{each.device_hours:.6f}", each.attempts]
        )
    return out.getvalue()
