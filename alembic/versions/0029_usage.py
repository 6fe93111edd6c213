"""The time on devices of each key and day, and quotas of keys.

Revision ID: 0029
Revises: 0028
"""

import sqlalchemy as sa

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("device_seconds", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "day", name=op.f("pk_usage")),
        sqlite_with_rowid=False,
    )
    op.add_column("keys", sa.Column("device_hours", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("keys", "device_hours")
    op.drop_table("usage")
