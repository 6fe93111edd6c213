"""When jobs last made way for a job.

Revision ID: 0030
Revises: 0029
"""

import sqlalchemy as sa

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("preempts_after", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "preempts_after")
