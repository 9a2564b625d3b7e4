"""Edge devices: invitations, devices with their keys and boots, runs, reports, and the models they report on."""

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("board", sa.Text(), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("firmware_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rotate_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("boot_id", sa.String(length=16), nullable=True),
        sa.Column("clock_synchronised", sa.Boolean(), nullable=True),
        sa.Column("agent_version", sa.Text(), nullable=True),
        sa.Column("reset_reason", sa.Text(), nullable=True),
        sa.Column("rssi", sa.BigInteger(), nullable=True),
        sa.Column("heap_free", sa.BigInteger(), nullable=True),
        sa.Column("queue_depth", sa.BigInteger(), nullable=True),
        sa.Column("dropped", sa.BigInteger(), nullable=True),
        sa.Column("uptime_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_devices"),
    )
    op.create_table(
        "edge_models",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("rankable", sa.Boolean(), nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_edge_models"),
    )
    op.create_table(
        "device_invites",
        sa.Column("code", sa.String(length=4), nullable=False),
        sa.Column("verifier", sa.String(length=64), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claim_digest", sa.String(length=64), nullable=True),
        sa.Column("device_id", sa.String(length=36), nullable=True),
        _of_device("device_invites"),
        sa.PrimaryKeyConstraint("code", name="pk_device_invites"),
    )
    op.create_table(
        "device_keys",
        sa.Column("device_id", sa.String(length=36), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_used_at", sa.DateTime(timezone=True), nullable=True),
        _of_device("device_keys"),
        sa.PrimaryKeyConstraint("device_id", "version", name="pk_device_keys"),
    )
    op.create_table(
        "device_boots",
        sa.Column("device_id", sa.String(length=36), nullable=False),
        sa.Column("boot_id", sa.String(length=16), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        _of_device("device_boots"),
        sa.PrimaryKeyConstraint("device_id", "boot_id", name="pk_device_boots"),
    )
    op.create_table(
        "device_runs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("device_id", sa.String(length=36), nullable=False),
        sa.Column("boot_id", sa.String(length=16), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("model_sha256", sa.String(length=64), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        _of_device("device_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_device_runs"),
        sa.UniqueConstraint(
            "device_id", "boot_id", "sequence", name="uq_device_runs_device_id_boot_id_sequence"
        ),
    )
    _create_reports()


def _create_reports() -> None:
    op.create_table(
        "device_reports",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("device_id", sa.String(length=36), nullable=False),
        sa.Column("boot_id", sa.String(length=16), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.String(length=36), nullable=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model_sha256", sa.String(length=64), nullable=False),
        sa.Column("input_source", sa.String(16), nullable=False),
        sa.Column("runner", sa.String(16), nullable=False),
        sa.Column("board", sa.Text(), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("ranked", sa.Boolean(), nullable=False),
        sa.Column("reasons", sa.JSON(), nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.Column("latency_p50_us", sa.BigInteger(), nullable=True),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("energy_per_inference_uj", sa.Double(), nullable=True),
        sa.Column("power_source", sa.Text(), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        _of_device("device_reports"),
        sa.PrimaryKeyConstraint("id", name="pk_device_reports"),
        sa.UniqueConstraint(
            "device_id", "boot_id", "sequence", name="uq_device_reports_device_id_boot_id_sequence"
        ),
    )
    op.create_index("ix_device_reports_device_id_id", "device_reports", ["device_id", "id"])
    op.create_index("ix_device_reports_run_id", "device_reports", ["run_id"])
    op.create_index(
        "ix_device_reports_partition",
        "device_reports",
        ["model_sha256", "input_source", "runner", "ranked"],
    )


def downgrade() -> None:
    """And back: devices have to be invited again."""
    op.drop_table("device_reports")
    op.drop_table("device_runs")
    op.drop_table("device_boots")
    op.drop_table("device_keys")
    op.drop_table("device_invites")
    op.drop_table("edge_models")
    op.drop_table("devices")


def _of_device(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["device_id"], ["devices.id"], name=f"fk_{table}_device_id_devices", ondelete="CASCADE"
    )
