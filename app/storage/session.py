"""Sessions, and whose a job, a file or a configuration is: in every query.

A session that is opened for a viewer sees and makes only what is that viewer's. One that is opened for
everybody, such as a worker's, sees everything. The rules hold for this class of session alone: an
application that embeds the service keeps its own as they are.
"""

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, event, orm
from sqlalchemy.orm import ORMExecuteState, with_loader_criteria

from app.storage.tables import Owned

OF_EVERYONE = {"accrue_of_everyone": True}
"""Execution options of a query that counts other people's things too, and returns nothing of them."""


@dataclass(frozen=True)
class Viewer:
    """Whose things a session sees, and whose the things will be that it makes.

    An administrator sees everything, and makes things of their own.
    """

    owner: str | None = None
    """The id of the key whose things are seen; null: everybody's."""
    maker: str | None = None
    """The id of the key that makes; null: none, as on a machine without keys."""


EVERYBODY = Viewer()


@dataclass(frozen=True)
class Transaction:
    """One that several write in, one after another."""

    connection: Connection
    known: dict[Any, Any] = field(default_factory=dict)
    """What one of them found out, for those after it."""


class Session(orm.Session):
    """A session for a viewer, which ends with its `with` block: using it afterwards raises, instead of
    taking a connection that nothing gives back.

    Args:
        viewer: whose things are seen and made.
        transaction: the one that it is part of; null: it has its own.
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
        """Whether what belongs to that key is shown to this session's viewer."""
        return self.viewer.owner in (None, owner)


@event.listens_for(Session, "do_orm_execute")
def _see_only_the_viewers(state: ORMExecuteState) -> None:
    assert isinstance(state.session, Session)
    owner = state.session.viewer.owner
    if owner is None or state.is_column_load or state.execution_options.get("accrue_of_everyone"):
        return
    state.statement = state.statement.options(
        with_loader_criteria(Owned, lambda owned: owned.owner == owner, include_aliases=True)
    )


@event.listens_for(Session, "before_flush")
def _make_them_the_viewers(session: Session, context: Any, instances: Any) -> None:
    for made in session.new:
        if session.viewer.maker is not None and isinstance(made, Owned):
            made.owner = session.viewer.maker
