"""What each of several ranks did in a step.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("step_metrics", sa.Column("ranks", DOCUMENT, nullable=True))


def downgrade() -> None:
    op.drop_column("step_metrics", "ranks")
