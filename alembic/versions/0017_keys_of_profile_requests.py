"""The key that requested a memory profile, so that keys take turns.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("profile_requests", sa.Column("requested_by", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("profile_requests", "requested_by")
