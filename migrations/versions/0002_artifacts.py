"""Artifacts: files that meters leave with a result."""

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "artifacts",
        sa.Column("result_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["result_id"], ["results.id"], name="fk_artifacts_result_id_results", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("result_id", "name", name="pk_artifacts"),
    )


def downgrade() -> None:
    """And back; the files are lost."""
    op.drop_table("artifacts")
