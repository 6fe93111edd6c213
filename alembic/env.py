"""Runs the migrations: from `accrue migrate`, at the service's start, or from the alembic command."""

from sqlalchemy import create_engine, text

from alembic import context
from app.models import Base
from app.settings import get_settings

MIGRATING = 0x4163637275650001
"""Key of the advisory lock that keeps two migrations of a PostgreSQL database apart."""


def run() -> None:
    engine = create_engine(context.config.attributes.get("url") or _own_url())
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


def _own_url() -> str:
    settings = get_settings()
    settings.make_directories()
    return settings.url


run()
