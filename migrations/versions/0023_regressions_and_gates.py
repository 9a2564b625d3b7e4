"""An entry keeps how rare its loss against the one before was; gates keep their outcomes."""

import sqlalchemy as sa
from alembic import op

revision: str = "0023"
down_revision: str | None = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("leaderboard", sa.Column("chance", sa.Double(), nullable=True))
    op.create_index("ix_leaderboard_chance", "leaderboard", ["chance"])
    op.create_table(
        "gates",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("series", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("chance", sa.Double(), nullable=False),
        sa.Column("told", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gates"),
    )
    op.create_index("ix_gates_series_id", "gates", ["series", "id"])


def downgrade() -> None:
    """And back: what gates found is gone."""
    op.drop_table("gates")
    op.drop_index("ix_leaderboard_chance", "leaderboard")
    with op.batch_alter_table("leaderboard") as table:
        table.drop_column("chance")
