"""Totals of each job's steps, and covering indexes for counts.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
COUNTED = "ix_jobs_owner_model_name_user_id_created_at"
SUMS = ("steps", "samples", "tokens", "skipped")


def upgrade() -> None:
    op.create_table(
        "job_totals",
        sa.Column("job_id", sa.String(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_totals_job_id_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_totals"),
        sqlite_with_rowid=False,
    )
    _backfill_totals()
    op.create_index(COUNTED, "jobs", ["owner", "model_name", "user_id", "created_at"])
    op.drop_index("ix_jobs_status_place_id", "jobs")
    op.create_index("ix_jobs_status_place_id_owner", "jobs", ["status", "place", "id", "owner"])


def _backfill_totals() -> None:
    jobs = sa.table("jobs", sa.column("id"), sa.column("progress", DOCUMENT))
    steps = sa.table("step_metrics", sa.column("job_id"), sa.column("samples"), sa.column("tokens"))
    totals = sa.table("job_totals", sa.column("job_id"), *(sa.column(name) for name in SUMS))
    counted = (
        sa.select(
            jobs.c.id,
            sa.func.count(),
            sa.func.sum(steps.c.samples),
            sa.func.sum(steps.c.tokens),
            sa.func.coalesce(sa.func.max(jobs.c.progress["skipped"].as_integer()), 0),
        )
        .join(steps, steps.c.job_id == jobs.c.id)
        .group_by(jobs.c.id)
    )
    op.execute(sa.insert(totals).from_select(["job_id", *SUMS], counted))


def downgrade() -> None:
    op.drop_index("ix_jobs_status_place_id_owner", "jobs")
    op.create_index("ix_jobs_status_place_id", "jobs", ["status", "place", "id"])
    op.drop_index(COUNTED, "jobs")
    op.drop_table("job_totals")
