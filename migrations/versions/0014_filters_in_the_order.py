"""What filters of the leaderboard ask for stands beside the order of a metric, so that one index has both.

An entry has the share of the best tokens that agree as well.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels = None
depends_on = None

ORDER = ("board", "name", "standing", "unsure", "place", "result_id")
ADDED: dict[str, sa.Text | sa.Double[float] | sa.Boolean] = {
    "hardware_class": sa.Text(),
    "backend": sa.Text(),
    "stack": sa.Text(),
    "top1": sa.Double(),
    "kld": sa.Double(),
    "clean": sa.Boolean(),
}
TOP1_OF_ENTRIES = """
UPDATE leaderboard SET top1 = (
    SELECT value FROM metrics WHERE metrics.result_id = leaderboard.result_id AND metrics.name = 'top1_agreement'
)
"""
OF_ENTRIES = """
UPDATE metrics SET
    hardware_class = entry.hardware_class,
    backend = entry.backend,
    top1 = entry.top1,
    kld = entry.kld,
    clean = entry.warnings = '',
    stack = COALESCE((
        SELECT ' ' || {joined}(technique.name, ' ') || ' '
        FROM entry_techniques AS technique WHERE technique.result_id = entry.result_id
    ), ' ')
FROM leaderboard AS entry WHERE entry.result_id = metrics.result_id
"""


def upgrade() -> None:
    """Forward. Rows that are there already get what their entries and metrics say."""
    op.add_column("leaderboard", sa.Column("top1", sa.Double(), nullable=True))
    op.execute(TOP1_OF_ENTRIES)
    op.drop_index("ix_metrics_order", "metrics")
    for name, type_ in ADDED.items():
        op.add_column("metrics", sa.Column(name, type_, nullable=True))
    joined = "string_agg" if op.get_bind().dialect.name == "postgresql" else "group_concat"
    op.execute(OF_ENTRIES.format(joined=joined))
    op.create_index("ix_metrics_order", "metrics", ORDER, postgresql_include=list(ADDED))


def downgrade() -> None:
    """And back: entries, their techniques and metrics have it all."""
    op.drop_index("ix_metrics_order", "metrics")
    for name in ADDED:
        op.drop_column("metrics", name)
    op.create_index("ix_metrics_order", "metrics", ORDER)
    op.drop_column("leaderboard", "top1")
