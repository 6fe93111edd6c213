"""Sessions that see only their viewer's rows.

A session that is opened for a viewer adds the owner to every query on jobs, files and configurations, and to
every new row. A session for everybody, such as a worker's, sees all rows. The rules apply only to this
class of session: the sessions of an application that embeds the service are unchanged.
"""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, event, orm
from sqlalchemy.orm import ORMExecuteState, with_loader_criteria

from app.storage.tables import Owned

OF_EVERYONE = {"accrue_of_everyone": True}
"""Execution options for a query that also returns rows of other owners. From these rows, the code that runs
the query may pass on to a client only counts and the speeds of devices."""


@dataclass(frozen=True)
class Viewer:
    """Which rows a session sees, and which owner it gives to new ones.

    An administrator sees the rows of all owners, and owns only the rows that the administrator creates.
    """

    owner: str | None = None
    """The id of the key whose rows are visible, or None for all rows."""
    creator: str | None = None
    """The id of the key that owns new rows, or None for no owner, as on a machine without keys."""


EVERYBODY = Viewer()


@dataclass(frozen=True)
class Transaction:
    """A transaction that several callers write in, one after another."""

    connection: Connection
    known: dict[Any, Any] = field(default_factory=dict)
    """Values that one caller has computed, for the callers after it."""


class Session(orm.Session):
    """A session for a viewer. It ends with its `with` block: using it afterwards raises an error, instead of
    taking a connection that is never returned.

    Args:
        viewer: which rows are visible, and who owns new ones.
        transaction: the shared transaction that the session is part of, or None if it has its own.
    """

    def __init__(
        self,
        bind: Engine | Connection,
        viewer: Viewer = EVERYBODY,
        transaction: Transaction | None = None,
        **options: Any,
    ) -> None:
        super().__init__(bind, expire_on_commit=False, close_resets_only=False, **options)
        self.viewer = viewer
        self.shared_transaction = transaction

    def shows(self, owner: str | None) -> bool:
        """Whether this session's viewer may see rows of that owner."""
        return self.viewer.owner in (None, owner)


@event.listens_for(Session, "do_orm_execute")
def _filter_by_owner(state: ORMExecuteState) -> None:
    assert isinstance(state.session, Session)
    owner = state.session.viewer.owner
    if owner is None or state.is_column_load or state.execution_options.get("accrue_of_everyone"):
        return
    state.statement = state.statement.options(
        with_loader_criteria(Owned, lambda owned: owned.owner == owner, include_aliases=True)
    )


@event.listens_for(Session, "before_flush")
def _set_owner(session: Session, context: Any, instances: Any) -> None:
    for made in session.new:
        if session.viewer.creator is not None and isinstance(made, Owned):
            made.owner = session.viewer.creator
