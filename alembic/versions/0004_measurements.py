"""Measurements per micro-batch size: predicted and measured memory, and throughput.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KEPT = "job_id, attempt, created_at, source, device, device_name, predicted_bytes, measured_bytes"


def upgrade() -> None:
    op.create_table(
        "measurements",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("device_name", sa.String(), nullable=False),
        sa.Column("accumulating", sa.Boolean(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("predicted_bytes", sa.BigInteger(), nullable=False),
        sa.Column("measured_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "attempt", "kind", "tokens", name="pk_measurements"),
    )
    op.create_index(
        "ix_measurements_architecture_device_name", "measurements", ["architecture", "device_name"]
    )
    op.execute(
        f"INSERT INTO measurements ({KEPT}, tokens, kind, key, architecture, accumulating) "
        f"SELECT {KEPT}, largest_tokens, 'run', '', '', TRUE FROM prediction_errors"
    )
    op.drop_table("prediction_errors")


def downgrade() -> None:
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
    op.execute(
        f"INSERT INTO prediction_errors ({KEPT}, largest_tokens) "
        f"SELECT {KEPT}, tokens FROM measurements WHERE kind = 'run' AND job_id IN (SELECT id FROM jobs)"
    )
    op.drop_table("measurements")
