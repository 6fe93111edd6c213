"""Requests that carried an Idempotency-Key, with their answers.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "answered_requests",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("said", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name="pk_answered_requests"),
    )
    op.create_index("ix_answered_requests_created_at", "answered_requests", ["created_at"])


def downgrade() -> None:
    op.drop_table("answered_requests")
