"""An index of files by content hash.

Revision ID: 0014
Revises: 0013
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_files_sha256", "files", ["sha256"])


def downgrade() -> None:
    op.drop_index("ix_files_sha256", "files")
