"""API keys, and the owners of jobs, files and configurations.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
OWNED = ("jobs", "files", "configurations")


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("scopes", DOCUMENT, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("digest", name="uq_keys_digest"),
    )
    for table in OWNED:
        op.add_column(table, sa.Column("owner", sa.String(), nullable=True))
        op.create_index(f"ix_{table}_owner_id", table, ["owner", "id"])


def downgrade() -> None:
    for table in OWNED:
        op.drop_index(f"ix_{table}_owner_id", table)
        op.drop_column(table, "owner")
    op.drop_table("keys")
