"""What a preference objective measured in each step.

Revision ID: 0026
Revises: 0025
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("step_metrics", sa.Column("rewards", DOCUMENT, nullable=True))


def downgrade() -> None:
    op.drop_column("step_metrics", "rewards")
