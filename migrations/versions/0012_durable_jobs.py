"""Jobs know whose they are, how urgent, what became of their attempts, and by when; workers say their versions."""

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels = None
depends_on = None

QUEUED = sa.text("state = 'queued'")
WITH_DEADLINE = sa.text("state = 'queued' AND deadline IS NOT NULL")
SUCCEEDED = sa.text("state = 'succeeded'")
INDEXES = {
    "ix_jobs_queue": (("device", "owner", "precedence", "created_at", "id"), QUEUED),
    "ix_jobs_deadline": (("deadline",), WITH_DEADLINE),
    "ix_jobs_history": (("device", "workload", "plan", "ended_at"), SUCCEEDED),
}


def _columns() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("owner", sa.Text(), nullable=False, server_default="open"),
        sa.Column("precedence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failure", sa.String(16), nullable=True),
        sa.Column("parked", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("forgiven", sa.BigInteger(), nullable=False, server_default="0"),
    )


def upgrade() -> None:
    """Forward. Jobs that are there already belong to nobody's key and have the usual priority; workers that run now say
    no versions until they are started again, so that nothing is reused on their account."""
    op.drop_index("ix_jobs_queue", "jobs")
    for column in _columns():
        op.add_column("jobs", column)
    with op.batch_alter_table("jobs") as jobs:  # the defaults are for rows that are there already
        for column in _columns():
            if not column.nullable:
                jobs.alter_column(column.name, existing_type=column.type, server_default=None)
    for name, (columns, where) in INDEXES.items():
        op.create_index(name, "jobs", list(columns), postgresql_where=where, sqlite_where=where)
    op.create_index("ix_attempts_ended_at", "attempts", ["ended_at"])
    op.create_index("ix_variants_result_id", "variants", ["result_id"])
    op.add_column("workers", sa.Column("software", sa.JSON(), nullable=False, server_default="{}"))
    with op.batch_alter_table("workers") as workers:
        workers.alter_column("software", existing_type=sa.JSON(), server_default=None)


def downgrade() -> None:
    """And back: what waits is taken by age alone, and at once."""
    op.drop_column("workers", "software")
    op.drop_index("ix_variants_result_id", "variants")
    op.drop_index("ix_attempts_ended_at", "attempts")
    for name in INDEXES:
        op.drop_index(name, "jobs")
    op.create_index(
        "ix_jobs_queue",
        "jobs",
        ["device", "created_at", "id"],
        postgresql_where=QUEUED,
        sqlite_where=QUEUED,
    )
    for column in reversed(_columns()):
        op.drop_column("jobs", column.name)
