"""Which report of a device stands on the edge leaderboard."""

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels = None
depends_on = None

_PLACE = ("model_sha256", "input_source", "runner", "device_id", "ranked")


def upgrade() -> None:
    """Forward; of reports that are there already the newest of each place stands."""
    op.create_table(
        "edge_standings",
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("input_source", sa.String(16), nullable=False),
        sa.Column("runner", sa.String(16), nullable=False),
        sa.Column("device_id", sa.String(36), nullable=False),
        sa.Column("ranked", sa.Boolean(), nullable=False),
        sa.Column("report_id", sa.String(36), nullable=False),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name="fk_edge_standings_device_id_devices", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["report_id"],
            ["device_reports.id"],
            name="fk_edge_standings_report_id_device_reports",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(*_PLACE, name="pk_edge_standings"),
    )
    place = ", ".join(_PLACE)
    op.execute(
        f"INSERT INTO edge_standings ({place}, report_id) "
        f"SELECT {place}, max(id) FROM device_reports GROUP BY {place}"
    )


def downgrade() -> None:
    """And back."""
    op.drop_table("edge_standings")
