"""Runs the migrations: from `accrue migrate`, at the service's start, or from the alembic command."""

from typing import Any

from sqlalchemy import Connection, create_engine, event, text

from alembic import context
from app.settings import get_settings
from app.storage.tables import Base

MIGRATING = 0x4163637275650001
"""Key of the advisory lock that stops two processes from migrating a PostgreSQL database at once."""


def run() -> None:
    engine = create_engine(context.config.attributes.get("url") or _own_url())
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _disable_implicit_transactions)
        event.listen(engine, "begin", _begin)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATING})
            connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_as_batch=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


def _disable_implicit_transactions(connection: Any, record: Any) -> None:
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    """Begins the transaction that the driver omits before CREATE or DROP; without it, a killed migration
    would stay half done."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _own_url() -> str:
    settings = get_settings()
    settings.make_directories()
    return settings.resolved_database_url


run()
