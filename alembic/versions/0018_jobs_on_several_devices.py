"""How many devices a job needs, and which GPUs, instead of at most one GPU.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_JOBS = sa.table("jobs", sa.column("id"), sa.column("gpu_id"), sa.column("gpu_mask"))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("device_count", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("gpu_mask", sa.BigInteger(), nullable=False, server_default="0"))
    connection = op.get_bind()
    pinned = sa.select(_JOBS.c.id, _JOBS.c.gpu_id).where(_JOBS.c.gpu_id.is_not(None))
    for job_id, gpu_id in connection.execute(pinned).all():
        mask = 1 << min(gpu_id, 62)
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == job_id).values(gpu_mask=mask))
    op.drop_column("jobs", "gpu_id")


def downgrade() -> None:
    op.add_column("jobs", sa.Column("gpu_id", sa.Integer(), nullable=True))
    connection = op.get_bind()
    pinned = sa.select(_JOBS.c.id, _JOBS.c.gpu_mask).where(_JOBS.c.gpu_mask != 0)
    for job_id, mask in connection.execute(pinned).all():
        first = mask.bit_length() - 1
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == job_id).values(gpu_id=first))
    op.drop_column("jobs", "gpu_mask")
    op.drop_column("jobs", "device_count")
