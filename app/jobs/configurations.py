"""Stored accumulation configurations."""

from app.errors import NotFound
from app.storage.session import Session
from app.storage.tables import Configuration


def find(session: Session, config_id: str, field: str | None = None, *, lock: bool = False) -> Configuration:
    """A configuration.

    Args:
        lock: no other transaction can change it until this one ends; jobs can still refer to it.

    Raises:
        NotFound: no configuration has that id.
    """
    locking = {"key_share": True} if lock else None
    row = session.get(Configuration, config_id, with_for_update=locking, populate_existing=lock)
    if row is None:
        raise NotFound(f"No configuration has the id {config_id}.", field=field)
    return row
