"""Whose a job, a file, a configuration is: in every query, whoever writes it.

A session that carries an owner sees and makes only that owner's things. One without, such as a worker's
or an administrator's, sees everything.
"""

from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria

from app.storage.database import Database
from app.storage.tables import Owned

OF_EVERYONE = {"accrue_of_everyone": True}
"""Execution options of a query that counts other people's things too, and tells nothing of them."""


def seen_by(database: Database, owner: str | None, maker: str | None) -> Database:
    """The same database with one owner's things alone in it; null: everybody's.

    Args:
        maker: whose is what is made; an administrator sees everything, and makes things of their own.
    """
    return database.with_info(owner=owner, maker=maker)


@event.listens_for(Session, "do_orm_execute")
def _only_ones_own(state: ORMExecuteState) -> None:
    owner = state.session.info.get("owner")
    if owner is None or state.is_column_load or state.execution_options.get("accrue_of_everyone"):
        return
    state.statement = state.statement.options(
        with_loader_criteria(Owned, lambda owned: owned.owner == owner, include_aliases=True)
    )


@event.listens_for(Session, "before_flush")
def _made_by(session: Session, context: Any, instances: Any) -> None:
    maker = session.info.get("maker")
    for made in session.new:
        if maker is not None and isinstance(made, Owned):
            made.owner = maker


def is_seen(session: Session, owner: str | None) -> bool:
    """Whether what belongs to that key is shown to whoever this session is for."""
    return session.info.get("owner") in (None, owner)
