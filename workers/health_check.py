"""`python -m workers.health_check`: whether this machine's worker was active lately, as the database says."""

import socket
import sys

from sqlalchemy import select

from app.devices.live_workers import SILENT_SECONDS
from app.settings import get_settings
from app.storage.database import Database, database_now
from app.storage.tables import Worker


def is_alive(database: Database, hostname: str) -> bool:
    """Whether a worker of that machine was recently active."""
    heard = select(Worker.id).where(
        Worker.hostname == hostname, Worker.heartbeat_at > database_now() - SILENT_SECONDS
    )
    with database.reading() as session:
        return session.scalar(heard.limit(1)) is not None


if __name__ == "__main__":
    sys.exit(0 if is_alive(Database(get_settings().resolved_database_url), socket.gethostname()) else 1)
