"""The first tables.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "configurations",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("given", DOCUMENT, nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("effective_batch_size", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_configurations")),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("examples", sa.Integer(), nullable=False),
        sa.Column("inline", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("hostname", sa.String(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("devices", DOCUMENT, nullable=False),
        sa.Column("running", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("requested", sa.String(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("user_id", DOCUMENT, nullable=True),
        sa.Column("labels", DOCUMENT, nullable=False),
        sa.Column("config_id", sa.String(), nullable=True),
        sa.Column("file_id", sa.String(), nullable=False),
        sa.Column("config", DOCUMENT, nullable=False),
        sa.Column("training_config", DOCUMENT, nullable=False),
        sa.Column("spec", DOCUMENT, nullable=False),
        sa.Column("plan", DOCUMENT, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("device", sa.String(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("progress", DOCUMENT, nullable=False),
        sa.Column("result", DOCUMENT, nullable=True),
        sa.Column("error", DOCUMENT, nullable=True),
        sa.ForeignKeyConstraint(
            ["config_id"],
            ["configurations.id"],
            name=op.f("fk_jobs_config_id_configurations"),
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_jobs_file_id_files")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_config_id"), ["config_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_jobs_file_id"), ["file_id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_jobs_status_priority_id"), ["status", "priority", "id"], unique=False
        )

    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("plan", DOCUMENT, nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("line", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("level", sa.String(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("data", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_events_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_events")),
        sa.UniqueConstraint("job_id", "line", name=op.f("uq_job_events_job_id_line")),
    )
    with op.batch_alter_table("job_events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_job_events_job_id_id"), ["job_id", "id"], unique=False)

    op.create_table(
        "step_metrics",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("micro_step", sa.Integer(), nullable=False),
        sa.Column("batch_idx", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("loss_ema", sa.Double(), nullable=False),
        sa.Column("gradient_accumulation_steps", sa.Integer(), nullable=False),
        sa.Column("effective_batch_size", sa.Integer(), nullable=False),
        sa.Column("physical_batch_size", sa.Integer(), nullable=False),
        sa.Column("learning_rate", sa.Double(), nullable=False),
        sa.Column("grad_norm", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("padded_tokens", sa.Integer(), nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=False),
        sa.Column("memory_gb", sa.Double(), nullable=True),
        sa.Column("peak_gb", sa.Double(), nullable=True),
        sa.Column("noise_scale", sa.Double(), nullable=True),
        sa.Column("skipped", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("data_seconds", sa.Double(), nullable=False),
        sa.Column("forward_backward_seconds", sa.Double(), nullable=False),
        sa.Column("optimizer_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_step_metrics_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "step", name=op.f("pk_step_metrics")),
    )


def downgrade() -> None:
    op.drop_table("step_metrics")
    with op.batch_alter_table("job_events", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_job_events_job_id_id"))

    op.drop_table("job_events")
    op.drop_table("attempts")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_status_priority_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_file_id"))
        batch_op.drop_index(batch_op.f("ix_jobs_config_id"))

    op.drop_table("jobs")
    op.drop_table("workers")
    op.drop_table("files")
    op.drop_table("configurations")
