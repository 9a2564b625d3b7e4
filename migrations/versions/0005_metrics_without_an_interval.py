"""A metric without an interval has none in its row either: it ranked as if it were exact."""

from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels = None
depends_on = None

RESULTS = sa.table("results", sa.column("id", sa.String), sa.column("document", sa.JSON))
METRICS = sa.table("metrics", *(sa.column(name) for name in ("result_id", "name", "value", "low", "high")))
COUNTED = ("weight_bytes", "params_total", "bytes_per_param")
BATCH = 500


def upgrade() -> None:
    """Forward: the bounds of each metric whose document has no interval become null."""
    with op.batch_alter_table("metrics") as metrics:
        metrics.alter_column("low", existing_type=sa.Double(), nullable=True)
        metrics.alter_column("high", existing_type=sa.Double(), nullable=True)
    connection = op.get_bind()
    forget = (
        sa.update(METRICS)
        .where(METRICS.c.result_id == sa.bindparam("of"), METRICS.c.name == sa.bindparam("metric"))
        .values(low=None, high=None)
    )
    last = ""
    query = sa.select(RESULTS).order_by(RESULTS.c.id).limit(BATCH)
    while page := connection.execute(query.where(RESULTS.c.id > last)).all():
        if unsure := [{"of": row.id, "metric": name} for row in page for name in _unsure(row.document)]:
            connection.execute(forget, unsure)
        last = page[-1].id


def downgrade() -> None:
    """And back: without an interval the bounds are the value again."""
    op.execute(
        sa.update(METRICS).where(METRICS.c.low.is_(None)).values(low=METRICS.c.value, high=METRICS.c.value)
    )
    with op.batch_alter_table("metrics") as metrics:
        metrics.alter_column("low", existing_type=sa.Double(), nullable=False)
        metrics.alter_column("high", existing_type=sa.Double(), nullable=False)


def _unsure(document: dict) -> Iterator[str]:
    for name, metric in document["metrics"].items():
        if metric.get("ci") is None and name not in COUNTED:
            yield name
