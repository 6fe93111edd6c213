"""Requests for data previews.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "preview_requests",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("file_id", sa.String(), nullable=False),
        sa.Column("order", DOCUMENT, nullable=False),
        sa.Column("answer", DOCUMENT, nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["file_id"], ["files.id"], name="fk_preview_requests_file_id_files", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_preview_requests"),
    )
    op.create_index("ix_preview_requests_file_id", "preview_requests", ["file_id"])


def downgrade() -> None:
    op.drop_table("preview_requests")
