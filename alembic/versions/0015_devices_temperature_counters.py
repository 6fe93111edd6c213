"""A job's GPU, GPU temperatures, synchronisation time, more totals, and counters.

Revision ID: 0015
Revises: 0014
"""

import sqlalchemy as sa

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("gpu_id", sa.Integer(), nullable=True))
    op.add_column("step_metrics", sa.Column("synchronise_seconds", sa.Double(), nullable=True))
    op.add_column("step_metrics", sa.Column("temperature_celsius", sa.Double(), nullable=True))
    for name in ("seconds", "device_seconds"):
        op.add_column("job_totals", sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    op.add_column("job_totals", sa.Column("final_loss", sa.Double(), nullable=True))
    op.create_table(
        "counters",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name="pk_counters"),
    )
    _backfill_totals()


def _backfill_totals() -> None:
    """Fills the new totals from existing rows, in SQL that SQLite and PostgreSQL both accept."""
    op.execute(
        """
        UPDATE job_totals SET
          seconds = coalesce((SELECT sum(data_seconds + forward_backward_seconds + optimizer_seconds)
                              FROM step_metrics WHERE step_metrics.job_id = job_totals.job_id), 0),
          device_seconds = coalesce((SELECT sum(ended_at - claimed_at)
                                     FROM attempts WHERE attempts.job_id = job_totals.job_id), 0),
          final_loss = (SELECT loss FROM step_metrics WHERE step_metrics.job_id = job_totals.job_id
                        ORDER BY step DESC LIMIT 1)
        """
    )


def downgrade() -> None:
    op.drop_table("counters")
    for name in ("final_loss", "device_seconds", "seconds"):
        op.drop_column("job_totals", name)
    op.drop_column("step_metrics", "temperature_celsius")
    op.drop_column("step_metrics", "synchronise_seconds")
    op.drop_column("jobs", "gpu_id")
