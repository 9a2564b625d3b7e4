"""The index of the rows of each class of hardware is for pages that ask for one: PostgreSQL sorted whole boards rather
than read the order of the other index. Boards have an index of their models; one that nothing reads is gone."""

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"
branch_labels = None
depends_on = None
ORDER = ("board", "name", "hardware_class", "unsure", "place", "result_id")
CURRENT, SHOWN = "standing = 'current'", sa.text("standing != 'earlier'")


def upgrade() -> None:
    """Forward."""
    op.create_index("ix_boards_source_model_newest", "boards", ("source", "model", "newest"))
    op.drop_index("ix_leaderboard_shown", "leaderboard")
    _index_again(f"{CURRENT} AND hardware_class IS NOT NULL")


def downgrade() -> None:
    """And back."""
    _index_again(CURRENT)
    op.create_index(
        "ix_leaderboard_shown", "leaderboard", ["board"], postgresql_where=SHOWN, sqlite_where=SHOWN
    )
    op.drop_index("ix_boards_source_model_newest", "boards")


def _index_again(rows: str) -> None:
    op.drop_index("ix_metrics_hardware", "metrics")
    op.create_index(
        "ix_metrics_hardware",
        "metrics",
        ORDER,
        postgresql_include=["backend", "stack", "top1", "kld", "clean"],
        postgresql_where=sa.text(rows),
        sqlite_where=sa.text(rows),
    )
