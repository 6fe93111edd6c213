"""Keyset pagination of lists, newest first unless requested otherwise."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Select

from app.contract.base import Page
from app.storage.session import Session

Row = TypeVar("Row")
Item = TypeVar("Item")


def page(
    session: Session,
    query: Select[Row],
    key: Any,
    limit: int,
    after: str | None,
    answer: Callable[[Row], Item],
    *,
    oldest_first: bool = False,
) -> Page[Item]:
    """One page of a query, by an id column whose values sort by time of creation."""
    if after is not None:
        query = query.where(key > after if oldest_first else key < after)
    ordered = query.order_by(key if oldest_first else key.desc())
    rows: Sequence[Row] = session.scalars(ordered.limit(limit + 1)).all()
    data = [answer(row) for row in rows[:limit]]
    return Page(
        data=data,
        has_more=len(rows) > limit,
        first_id=getattr(rows[0], key.key) if data else None,
        last_id=getattr(rows[len(data) - 1], key.key) if data else None,
    )


def page_of(items: Sequence[Item], key: Callable[[Item], str], limit: int, after: str | None) -> Page[Item]:
    """One page of a list that is in memory, newest first."""
    rest = [item for item in items if after is None or key(item) < after]
    data = rest[:limit]
    return Page(
        data=data,
        has_more=len(rest) > limit,
        first_id=key(data[0]) if data else None,
        last_id=key(data[-1]) if data else None,
    )
