"""Stored accumulation configurations."""

from app.errors import NotFound
from app.storage.session import Session
from app.storage.tables import Configuration


def find(session: Session, config_id: str, field: str | None = None, *, lock: bool = False) -> Configuration:
    """A configuration.

    Args:
        lock: no other transaction can change it until this one ends.

    Raises:
        NotFound: no configuration has that id.
    """
    row = session.get(Configuration, config_id, with_for_update=lock or None, populate_existing=lock)
    if row is None:
        raise NotFound(f"No configuration has the id {config_id}.", field=field)
    return row
