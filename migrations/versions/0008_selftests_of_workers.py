"""Workers say what the last self-test of their device found."""

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward; workers that are there already have none."""
    op.add_column("workers", sa.Column("selftest", sa.JSON(), nullable=True))


def downgrade() -> None:
    """And back."""
    with op.batch_alter_table("workers") as table:
        table.drop_column("selftest")
