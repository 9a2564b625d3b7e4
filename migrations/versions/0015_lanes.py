"""Jobs of a key that ask for the same of a worker share a lane; expired leases are found by an index."""

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels = None
depends_on = None

QUEUED = sa.text("state = 'queued'")
RUNNING = sa.text("state = 'running'")


def _index(name: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, "jobs", columns, postgresql_where=where, sqlite_where=where)


def upgrade() -> None:
    """Forward. Jobs that are there already have no lane, and neither have those that an earlier version still posts."""
    op.drop_index("ix_jobs_queue", "jobs")
    op.add_column("jobs", sa.Column("lane", sa.String(64), nullable=True))
    _index("ix_jobs_queue", ["device", "lane", "precedence", "created_at", "id", "owner"], QUEUED)
    _index("ix_jobs_leases", ["lease_until"], RUNNING)


def downgrade() -> None:
    """And back."""
    op.drop_index("ix_jobs_leases", "jobs")
    op.drop_index("ix_jobs_queue", "jobs")
    op.drop_column("jobs", "lane")
    _index("ix_jobs_queue", ["device", "owner", "precedence", "created_at", "id"], QUEUED)
