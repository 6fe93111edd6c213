"""The files that jobs are evaluated on, so that a file's jobs are found without reading their specs.

Revision ID: 0031
Revises: 0030
"""

import sqlalchemy as sa

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("validation_file_id", sa.String(), nullable=True))
    of_spec = {
        "sqlite": "json_extract(spec, '$.data.validation.file_id')",
        "postgresql": "spec #>> '{data,validation,file_id}'",
    }
    found = of_spec[op.get_bind().dialect.name]
    op.execute(f"UPDATE jobs SET validation_file_id = {found} WHERE {found} IS NOT NULL")
    op.create_index("ix_jobs_validation_file_id", "jobs", ["validation_file_id"])


def downgrade() -> None:
    op.drop_index("ix_jobs_validation_file_id", "jobs")
    op.drop_column("jobs", "validation_file_id")
