"""What other tools measured: files of theirs that were imported."""

import sqlalchemy as sa
from alembic import op

revision: str = "0024"
down_revision: str | None = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "measured_by_others",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("imported_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measured_by_others"),
        sa.UniqueConstraint("digest", name="uq_measured_by_others_digest"),
    )


def downgrade() -> None:
    """And back."""
    op.drop_table("measured_by_others")
