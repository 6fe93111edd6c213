"""Steps of a deleted job are deleted after it, in parts: they no longer refer to its row.

Revision ID: 0022
Revises: 0021
"""

import sqlalchemy as sa

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

FOREIGN_KEY = "fk_step_metrics_job_id_jobs"


def upgrade() -> None:
    with op.batch_alter_table("step_metrics", table_kwargs={"sqlite_with_rowid": False}) as steps:
        steps.drop_constraint(FOREIGN_KEY, type_="foreignkey")
    op.create_table(
        "deleted_jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deleted_jobs"),
    )


def downgrade() -> None:
    op.execute("DELETE FROM step_metrics WHERE job_id NOT IN (SELECT id FROM jobs)")
    op.drop_table("deleted_jobs")
    with op.batch_alter_table("step_metrics", table_kwargs={"sqlite_with_rowid": False}) as steps:
        steps.create_foreign_key(FOREIGN_KEY, "jobs", ["job_id"], ["id"], ondelete="CASCADE")
