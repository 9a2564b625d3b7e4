"""Jobs say what they need of a worker, and workers which packages and models they have."""

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels = None
depends_on = None

JOBS = sa.table("jobs", *(sa.column(name, sa.String) for name in ("id", "state", "backend", "model")))
WORKERS = sa.table(
    "workers",
    sa.column("packages", sa.JSON),
    sa.column("models", sa.JSON),
    sa.column("downloads", sa.Boolean),
)
UNFINISHED = JOBS.c.state.in_(("queued", "running"))
ELSEWHERE = sa.or_(JOBS.c.model.like("path:%"), JOBS.c.model.like("hub:%"))


def upgrade() -> None:
    """Forward. Jobs that have not ended need their backend and their model. Workers that run now say nothing of their
    packages and models until they are started again."""
    needs = op.create_table(
        "job_needs",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_needs_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "kind", "name", name="pk_job_needs"),
    )
    backends = sa.select(JOBS.c.id, sa.literal("backend"), JOBS.c.backend).where(UNFINISHED)
    models = sa.select(JOBS.c.id, sa.literal("model"), JOBS.c.model).where(UNFINISHED, ELSEWHERE)
    for asked in (backends, models):
        op.execute(sa.insert(needs).from_select(["job_id", "kind", "name"], asked))
    op.add_column("workers", sa.Column("packages", sa.JSON(), nullable=True))
    op.add_column("workers", sa.Column("models", sa.JSON(), nullable=True))
    op.add_column("workers", sa.Column("downloads", sa.Boolean(), nullable=True))
    op.execute(sa.update(WORKERS).values(packages=[], models=[], downloads=True))
    with op.batch_alter_table("workers") as workers:
        workers.alter_column("packages", existing_type=sa.JSON(), nullable=False)
        workers.alter_column("models", existing_type=sa.JSON(), nullable=False)
        workers.alter_column("downloads", existing_type=sa.Boolean(), nullable=False)


def downgrade() -> None:
    """And back; what jobs need besides a device and a backend is forgotten."""
    with op.batch_alter_table("workers") as workers:
        for name in ("downloads", "models", "packages"):
            workers.drop_column(name)
    op.drop_table("job_needs")
