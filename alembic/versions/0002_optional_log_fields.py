"""Log lines: optional micro-batch losses and gradient norms, and a mixture's balance loss.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("step_metrics", sa.Column("aux_loss", sa.Double(), nullable=True))
    op.add_column("step_metrics", sa.Column("micro_losses", DOCUMENT, nullable=True))
    op.add_column("step_metrics", sa.Column("gradient_norms", DOCUMENT, nullable=True))


def downgrade() -> None:
    for name in ("gradient_norms", "micro_losses", "aux_loss"):
        op.drop_column("step_metrics", name)
