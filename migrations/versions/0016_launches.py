"""Jobs that a cluster's scheduler runs: which one, each time that a job was handed to it, and its launcher."""

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels = None
depends_on = None

VIA = sa.text("state = 'queued' AND via IS NOT NULL")
LIVE = sa.text("ended_at IS NULL")


def upgrade() -> None:
    """Forward. Jobs that are there already are for workers of the service."""
    op.add_column("jobs", sa.Column("via", sa.String(16), nullable=True))
    op.create_index(
        "ix_jobs_via",
        "jobs",
        ["via", "precedence", "created_at", "id"],
        postgresql_where=VIA,
        sqlite_where=VIA,
    )
    op.create_table(
        "launches",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("scheduler", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reference", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("fencing", sa.BigInteger(), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_launches_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_launches"),
        sa.UniqueConstraint("token_hash", name="uq_launches_token_hash"),
    )
    op.create_index(
        "ix_launches_live", "launches", ["job_id"], unique=True, postgresql_where=LIVE, sqlite_where=LIVE
    )
    op.create_index("ix_launches_job_id_created_at", "launches", ["job_id", "created_at"])
    op.create_table(
        "launchers",
        sa.Column("scheduler", sa.String(16), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("scheduler", name="pk_launchers"),
    )


def downgrade() -> None:
    """And back. Jobs that wait for a scheduler are cancelled: tables of before would hand them to any worker. What an
    attempt failed of becomes a kind that was known before."""
    op.execute("UPDATE jobs SET failure = 'lost' WHERE failure IN ('not_started', 'allocation_ended')")
    op.execute(
        "UPDATE jobs SET state = 'cancelled', ended_at = CURRENT_TIMESTAMP, "
        "reason = 'This version runs no jobs by a scheduler; post it again.' "
        "WHERE via IS NOT NULL AND state = 'queued'"
    )
    op.drop_table("launchers")
    op.drop_table("launches")
    op.drop_index("ix_jobs_via", "jobs")
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_column("via")
