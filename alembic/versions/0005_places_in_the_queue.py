"""Queue order by priority and age.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

AGEING_SECONDS = 600.0


def upgrade() -> None:
    op.add_column("jobs", sa.Column("place", sa.Double(), nullable=True))
    op.execute(f"UPDATE jobs SET place = created_at - priority * {AGEING_SECONDS}")
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column("place", existing_type=sa.Double(), nullable=False)
        jobs.drop_index("ix_jobs_status_priority_id")
        jobs.create_index("ix_jobs_status_place_id", ["status", "place", "id"])


def downgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_index("ix_jobs_status_place_id")
        jobs.create_index("ix_jobs_status_priority_id", ["status", "priority", "id"])
        jobs.drop_column("place")
