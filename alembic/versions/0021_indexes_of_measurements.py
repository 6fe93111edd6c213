"""Indexes for the newest measurements of a recipe, and of a kind of device.

Revision ID: 0021
Revises: 0020
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_measurements_key", "measurements", ["key", "device_name", "created_at"])
    op.create_index("ix_measurements_device", "measurements", ["device", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_measurements_device", "measurements")
    op.drop_index("ix_measurements_key", "measurements")
