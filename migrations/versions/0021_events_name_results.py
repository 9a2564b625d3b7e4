"""An event names the result of its variant, and the end of a run its job's attribution: neither is stored twice."""

import sqlalchemy as sa
from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"
branch_labels = None
depends_on = None
AT_ONCE = 500
POSTGRESQL = """
UPDATE job_events SET data = json_build_object('kind', kind, 'outcome', json_build_object(
    'index', data->'outcome'->'index', 'status', data->'outcome'->'status',
    'reason', data->'outcome'->'reason', 'result_id', data->'outcome'->'result'->'id'
)) WHERE kind = 'variant_finished'
"""
SQLITE = """
UPDATE job_events SET data = json_object('kind', kind, 'outcome', json_object(
    'index', json_extract(data, '$.outcome.index'), 'status', json_extract(data, '$.outcome.status'),
    'reason', json_extract(data, '$.outcome.reason'), 'result_id', json_extract(data, '$.outcome.result.id')
)) WHERE kind = 'variant_finished'
"""
FINISHED = """
UPDATE job_events SET data = '{"kind": "finished"}' WHERE kind = 'finished'
AND EXISTS (SELECT 1 FROM jobs WHERE jobs.id = job_events.job_id AND jobs.attribution IS NOT NULL)
"""
events = sa.table(
    "job_events",
    sa.column("job_id", sa.String),
    sa.column("sequence", sa.BigInteger),
    sa.column("kind", sa.Text),
    sa.column("data", sa.JSON),
)
jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("attribution", sa.JSON))
results = sa.table(
    "results",
    sa.column("id", sa.String),
    sa.column("environment_digest", sa.String),
    sa.column("document", sa.JSON),
)
environments = sa.table("environments", sa.column("digest", sa.String), sa.column("document", sa.JSON))


def upgrade() -> None:
    """Forward."""
    op.execute(POSTGRESQL if op.get_bind().dialect.name == "postgresql" else SQLITE)
    op.execute(FINISHED)


def downgrade() -> None:
    """And back: results and attributions are copied into the events again."""
    connection = op.get_bind()
    told = connection.execute(
        sa.select(events, jobs.c.attribution)
        .join_from(events, jobs, jobs.c.id == events.c.job_id)
        .where(events.c.kind.in_(("variant_finished", "finished")))
    )
    for rows in told.partitions(AT_ONCE):
        documents = _documents(
            [row.data["outcome"].get("result_id") for row in rows if "outcome" in row.data]
        )
        for row in rows:
            if row.kind == "finished":
                data = row.data | {"attribution": row.attribution}
            else:
                outcome = dict(row.data["outcome"])
                data = row.data | {
                    "outcome": outcome | {"result": documents.get(outcome.pop("result_id", None))}
                }
            here = (events.c.job_id == row.job_id) & (events.c.sequence == row.sequence)
            connection.execute(sa.update(events).where(here).values(data=data))


def _documents(result_ids: list[str | None]) -> dict[str | None, object]:
    """The results with their environments, by id."""
    query = (
        sa.select(results.c.id, results.c.document, environments.c.document.label("environment"))
        .join_from(results, environments, environments.c.digest == results.c.environment_digest)
        .where(results.c.id.in_([each for each in result_ids if each]))
    )
    found = op.get_bind().execute(query)
    return {row.id: row.document | {"environment": row.environment} for row in found}
