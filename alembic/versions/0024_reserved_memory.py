"""The memory that PyTorch's allocator holds on a GPU, which is more than what it has allocated.

Revision ID: 0024
Revises: 0023
"""

import sqlalchemy as sa

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("step_metrics", sa.Column("reserved_gb", sa.Double(), nullable=True))
    op.add_column("measurements", sa.Column("predicted_reserved_bytes", sa.BigInteger(), nullable=True))
    op.add_column("measurements", sa.Column("reserved_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("measurements", "reserved_bytes")
    op.drop_column("measurements", "predicted_reserved_bytes")
    op.drop_column("step_metrics", "reserved_gb")
