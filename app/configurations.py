"""Stored accumulation configurations."""

from sqlalchemy.orm import Session

from app.errors import NotFound
from app.models import Configuration


def find(session: Session, config_id: str, field: str | None = None) -> Configuration:
    """Raises:
    NotFound: no configuration has that id.
    """
    row = session.get(Configuration, config_id)
    if row is None:
        raise NotFound(f"No configuration has the id {config_id}.", field=field)
    return row
