"""Lengths of samples in tokens.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "lengths",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("file_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("content", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["file_id"], ["files.id"], name="fk_lengths_file_id_files", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name="pk_lengths"),
    )
    op.create_index("ix_lengths_file_id", "lengths", ["file_id"])


def downgrade() -> None:
    op.drop_table("lengths")
