"""Memory profiles, requests for profiles, and prediction errors.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("step_metrics", sa.Column("largest_tokens", sa.Integer(), nullable=True))
    op.create_table(
        "profiles",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("recipe", DOCUMENT, nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("torch_version", sa.String(), nullable=False),
        sa.Column("content", DOCUMENT, nullable=False),
        sa.UniqueConstraint("key", name="uq_profiles_key"),
    )
    op.create_index("ix_profiles_architecture", "profiles", ["architecture"])
    op.create_table(
        "profile_requests",
        sa.Column("key", sa.String(), primary_key=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("config", DOCUMENT, nullable=False),
        sa.Column("recipe", DOCUMENT, nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
    )
    op.create_table(
        "prediction_errors",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("device_name", sa.String(), nullable=False),
        sa.Column("largest_tokens", sa.Integer(), nullable=False),
        sa.Column("predicted_bytes", sa.BigInteger(), nullable=False),
        sa.Column("measured_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_prediction_errors"),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_prediction_errors_job_id_jobs", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    for name in ("prediction_errors", "profile_requests", "profiles"):
        op.drop_table(name)
    op.drop_column("step_metrics", "largest_tokens")
