"""Claims jobs and loses them, as workers do."""

from typing import Any

from sqlalchemy import update

from app.jobs import queue
from app.jobs.transitions import Fence
from app.storage.database import Database, database_now
from app.storage.tables import Job


def claim(database: Database, worker: str = "worker-1", lease: float = 15.0) -> Fence | None:
    with database.writing() as session:
        return queue.claim(session, worker, lease)


def in_transaction(database: Database, action: Any, *arguments: Any) -> Any:
    with database.writing() as session:
        return action(session, *arguments)


def expire(database: Database, job_id: str) -> None:
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(lease_until=database_now() - 1))
