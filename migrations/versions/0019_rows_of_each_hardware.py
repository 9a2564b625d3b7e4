"""An index of the current rows of each class of hardware in their order, for pages that ask for one."""

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels = None
depends_on = None
ORDER = ("board", "name", "hardware_class", "unsure", "place", "result_id")
CURRENT = sa.text("standing = 'current'")


def upgrade() -> None:
    """Forward."""
    op.create_index(
        "ix_metrics_hardware",
        "metrics",
        ORDER,
        postgresql_include=["backend", "stack", "top1", "kld", "clean"],
        postgresql_where=CURRENT,
        sqlite_where=CURRENT,
    )


def downgrade() -> None:
    """And back."""
    op.drop_index("ix_metrics_hardware", "metrics")
