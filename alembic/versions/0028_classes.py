"""The classes of a file's labelled texts; and a job's metadata under a name of its own.

Revision ID: 0028
Revises: 0027
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("files", sa.Column("classes", JSON, nullable=True))
    op.execute("ALTER TABLE jobs RENAME COLUMN labels TO client_metadata")


def downgrade() -> None:
    op.execute("ALTER TABLE jobs RENAME COLUMN client_metadata TO labels")
    op.drop_column("files", "classes")
