"""Attempts know their device, so that a job does not go on from what another GPU measured."""

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward. Attempts from before have no device: the next attempt of their job begins anew."""
    op.add_column("attempts", sa.Column("device", sa.Text(), nullable=True))


def downgrade() -> None:
    """And back; the devices are forgotten."""
    with op.batch_alter_table("attempts") as attempts:
        attempts.drop_column("device")
