"""Workers have labels, and jobs may require some of them.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("requirements", sa.String(), nullable=False, server_default="{}"))
    op.add_column("workers", sa.Column("labels", JSON, nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("workers", "labels")
    op.drop_column("jobs", "requirements")
