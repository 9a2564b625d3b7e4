"""An index of what boards are listed for: entries without the history, which grows with every result."""

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"
branch_labels = None
depends_on = None
SHOWN = sa.text("standing != 'earlier'")


def upgrade() -> None:
    """Forward."""
    op.create_index(
        "ix_leaderboard_shown", "leaderboard", ["board"], postgresql_where=SHOWN, sqlite_where=SHOWN
    )


def downgrade() -> None:
    """And back."""
    op.drop_index("ix_leaderboard_shown", "leaderboard")
