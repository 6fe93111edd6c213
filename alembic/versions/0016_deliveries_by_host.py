"""The host of each webhook delivery, so that a silent host delays only its own deliveries.

Revision ID: 0016
Revises: 0015
"""

from urllib.parse import urlsplit

import sqlalchemy as sa

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_DELIVERIES = sa.table(
    "deliveries", sa.column("id"), sa.column("url"), sa.column("host"), sa.column("not_before")
)


def upgrade() -> None:
    op.add_column("deliveries", sa.Column("host", sa.String(), nullable=True))
    connection = op.get_bind()
    waiting = sa.select(_DELIVERIES.c.id, _DELIVERIES.c.url).where(_DELIVERIES.c.not_before.is_not(None))
    for delivery_id, url in connection.execute(waiting).all():
        own = sa.update(_DELIVERIES).where(_DELIVERIES.c.id == delivery_id)
        connection.execute(own.values(host=_host(url)))


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def downgrade() -> None:
    op.drop_column("deliveries", "host")
