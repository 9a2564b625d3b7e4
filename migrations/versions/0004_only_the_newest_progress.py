"""Of a job's progress only the newest event is kept: there was one for each second."""

from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward; older progress is lost."""
    op.execute(
        "DELETE FROM job_events WHERE kind = 'progressed' AND EXISTS ("
        "SELECT 1 FROM job_events AS newer WHERE newer.job_id = job_events.job_id "
        "AND newer.kind = 'progressed' AND newer.sequence > job_events.sequence)"
    )


def downgrade() -> None:
    """And back: the tables are the same."""
