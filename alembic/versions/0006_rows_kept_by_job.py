"""Clusters rows by job: on SQLite, one tree instead of a table and an index, so fewer pages per write.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BY_JOB = ("attempts", "step_metrics", "job_events")


def upgrade() -> None:
    with op.batch_alter_table("job_events") as events:
        events.drop_index("ix_job_events_job_id_id")
        events.drop_constraint("uq_job_events_job_id_line", type_="unique")
        events.drop_constraint("pk_job_events", type_="primary")
        events.create_primary_key("pk_job_events", ["job_id", "id"])
    _rebuild(with_rowid=False)
    from_a_line = sa.text("line IS NOT NULL")
    op.create_index(
        "uq_job_events_job_id_line",
        "job_events",
        ["job_id", "line"],
        unique=True,
        sqlite_where=from_a_line,
        postgresql_where=from_a_line,
    )


def downgrade() -> None:
    op.drop_index("uq_job_events_job_id_line", "job_events")
    _rebuild(with_rowid=True)
    with op.batch_alter_table("job_events") as events:
        events.drop_constraint("pk_job_events", type_="primary")
        events.create_primary_key("pk_job_events", ["id"])
        events.create_unique_constraint("uq_job_events_job_id_line", ["job_id", "line"])
        events.create_index("ix_job_events_job_id_id", ["job_id", "id"])


def _rebuild(with_rowid: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        return
    for name in BY_JOB:
        with op.batch_alter_table(name, recreate="always", table_kwargs={"sqlite_with_rowid": with_rowid}):
            pass
