"""Requests for answers of models, and the parts of the answers.

Revision ID: 0025
Revises: 0024
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "inference_requests",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column("awaited_at", sa.Double(), nullable=False),
        sa.Column("order", JSON, nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("claimed_by", sa.String(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inference_requests")),
    )
    op.create_table(
        "answer_parts",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("content", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["inference_requests.id"],
            name=op.f("fk_answer_parts_request_id_inference_requests"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("request_id", "number", name=op.f("pk_answer_parts")),
    )


def downgrade() -> None:
    op.drop_table("answer_parts")
    op.drop_table("inference_requests")
