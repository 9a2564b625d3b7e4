"""An alert rule keeps how rare the newest change of its place was, which those of all other rules are held against."""

import sqlalchemy as sa
from alembic import op

revision: str = "0022"
down_revision: str | None = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("alert_rules", sa.Column("chance", sa.Double(), nullable=True))


def downgrade() -> None:
    """And back."""
    op.drop_column("alert_rules", "chance")
