"""Browsers that are signed in, what a variant's processes printed, and alert rules."""

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward; of variants that were measured before nothing was kept."""
    op.add_column("variants", sa.Column("printed", sa.Text(), nullable=True))
    op.create_table(
        "sign_ins",
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name="fk_sign_ins_key_id_api_keys", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("hash", name="pk_sign_ins"),
    )
    op.create_index("ix_sign_ins_expires_at", "sign_ins", ["expires_at"])
    _create_alert_rules()


def _create_alert_rules() -> None:
    op.create_table(
        "alert_rules",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("board", sa.BigInteger(), nullable=False),
        sa.Column("variant_digest", sa.String(length=64), nullable=False),
        sa.Column("hardware_class", sa.Text(), nullable=False),
        sa.Column("result_id", sa.String(length=36), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("fired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fired_for", sa.String(length=36), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_alert_rules"),
    )
    op.create_index("ix_alert_rules_place", "alert_rules", ["board", "variant_digest", "hardware_class"])


def downgrade() -> None:
    """And back: everybody is signed out, and no rule is left."""
    op.drop_table("alert_rules")
    op.drop_table("sign_ins")
    with op.batch_alter_table("variants") as table:
        table.drop_column("printed")
