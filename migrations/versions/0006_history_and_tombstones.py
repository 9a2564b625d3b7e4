"""The leaderboard knows every result: the current one of each place, earlier ones, invalid ones. And tombstones."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels = None
depends_on = None

PLACE = ("workload_digest", "variant_digest", "hardware_class", "source")
KEPT = (
    *(*PLACE, "result_id", "measured_at", "workload", "model", "backend", "device", "techniques", "score"),
    *("size_bytes", "summary"),
)
COMPARED = {"torch": ("optigpu", "torch", "transformers"), "llama_cpp": ("optigpu", "llama-cpp-python")}
BATCH = 500

RESULTS = sa.table(
    "results",
    sa.column("id", sa.String),
    sa.column("job_id", sa.String),
    sa.column("created_at", sa.DateTime(timezone=True)),
    sa.column("environment_digest", sa.String),
    sa.column("document", sa.JSON),
)
ENVIRONMENTS = sa.table("environments", sa.column("digest", sa.String), sa.column("document", sa.JSON))


def upgrade() -> None:
    """Forward: the leaderboard is filled again from all results; it held the newest valid one of each place."""
    op.create_table(
        "tombstones",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("job_id", sa.String(length=36), nullable=True),
        sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("withdrawn_by", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tombstones"),
    )
    op.drop_table("leaderboard")
    leaderboard = op.create_table(
        "leaderboard",
        *_columns(),
        sa.Column("standing", sa.String(16), nullable=False),
        sa.Column("primary_metric", sa.Text(), nullable=False),
        sa.Column("replicates", sa.BigInteger(), nullable=False),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("result_id", name="pk_leaderboard"),
    )
    op.create_index("ix_leaderboard_place", "leaderboard", list(PLACE))
    _create_pareto_index("standing", "score")
    best: dict[tuple[str, ...], tuple[object, ...]] = {}
    for entries in _entries(op.get_bind()):
        op.get_bind().execute(sa.insert(leaderboard), entries)
        for entry in entries:
            if entry["standing"] == "earlier":
                place = tuple(entry[name] for name in PLACE)
                best[place] = max(best.get(place, ()), _support(entry))
    chosen = [{"of": support[-1]} for support in best.values()]
    if chosen:
        choose = sa.update(leaderboard).where(leaderboard.c.result_id == sa.bindparam("of"))
        op.get_bind().execute(choose.values(standing="current"), chosen)


def downgrade() -> None:
    """And back: of each place the newest valid result stays on the leaderboard. Withdrawn results do not come back."""
    columns, same = ", ".join(KEPT), " AND ".join(f"later.{name} = entry.{name}" for name in PLACE)
    op.execute(
        f"CREATE TABLE leaderboard_kept AS SELECT {columns} FROM leaderboard AS entry "
        f"WHERE standing <> 'invalid' AND NOT EXISTS (SELECT 1 FROM leaderboard AS later WHERE {same} "
        "AND later.standing <> 'invalid' AND (later.measured_at > entry.measured_at "
        "OR (later.measured_at = entry.measured_at AND later.result_id > entry.result_id)))"
    )
    op.drop_table("leaderboard")
    op.create_table("leaderboard", *_columns(), sa.PrimaryKeyConstraint(*PLACE, name="pk_leaderboard"))
    _create_pareto_index("score")
    op.execute(f"INSERT INTO leaderboard ({columns}) SELECT {columns} FROM leaderboard_kept")
    op.drop_table("leaderboard_kept")
    op.drop_table("tombstones")


def _columns() -> list[sa.Column[Any] | sa.ForeignKeyConstraint]:
    """The columns that the table has before and after."""
    return [
        sa.Column("result_id", sa.String(length=36), nullable=False),
        sa.Column("workload_digest", sa.String(length=64), nullable=False),
        sa.Column("variant_digest", sa.String(length=64), nullable=False),
        sa.Column("hardware_class", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("device", sa.String(16), nullable=False),
        sa.Column("techniques", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("size_bytes", sa.Double(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["result_id"], ["results.id"], name="fk_leaderboard_result_id_results", ondelete="CASCADE"
        ),
    ]


def _create_pareto_index(*last: str) -> None:
    columns = ["workload_digest", "hardware_class", "device", "source", *last]
    op.create_index("ix_leaderboard_pareto", "leaderboard", columns)


def _entries(connection: sa.Connection) -> Iterator[list[dict[str, Any]]]:
    """The entries of all results, in batches; none is current yet."""
    environment = ENVIRONMENTS.c.document.label("environment")
    joined = RESULTS.join(ENVIRONMENTS, ENVIRONMENTS.c.digest == RESULTS.c.environment_digest)
    query = sa.select(RESULTS, environment).select_from(joined).order_by(RESULTS.c.id).limit(BATCH)
    last = ""
    while page := connection.execute(query.where(RESULTS.c.id > last)).all():
        yield [_entry(row) for row in page]
        last = page[-1].id


def _entry(row: sa.Row[Any]) -> dict[str, Any]:
    variant, verdict, metrics = (row.document[part] for part in ("variant", "verdict", "metrics"))
    names = [technique["name"] for technique in variant["stack"]]
    primary = metrics.get(variant["primary_metric"]) or {}
    size = metrics.get("peak_bytes" if variant["device"] == "cuda" else "weight_bytes") or {}
    sign = -1 if primary.get("better") == "lower" else 1
    same = ("workload_digest", "variant_digest", "model", "backend", "device", "primary_metric")
    return {name: variant[name] for name in same} | {
        "result_id": row.id,
        "hardware_class": row.environment["hardware_class"],
        "source": row.document["source"],
        "measured_at": row.created_at,
        "standing": "earlier" if verdict["valid"] else "invalid",
        "workload": variant["workload"]["kind"],
        "techniques": "|" + "".join(f"{name}|" for name in names),
        "replicates": primary.get("replicates", 0),
        "warnings": " ".join(verdict["warnings"]),
        "reasons": " ".join(verdict["reasons"]),
        "versions": _versions(variant["backend"], row.environment.get("software") or {}),
        "score": None if primary.get("value") is None else sign * primary["value"],
        "size_bytes": size.get("value"),
        "summary": {
            "job_id": row.job_id,
            "label": variant["label"],
            "workload": variant["workload"],
            "techniques": names,
            "warnings": verdict["warnings"],
            "notes": verdict.get("notes", []),
            "metrics": metrics,
        },
    }


def _versions(backend: str, software: Mapping[str, str]) -> dict[str, str]:
    compared = COMPARED.get(backend, ("optigpu",))
    return {package: software[package] for package in compared if package in software}


def _support(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """What the best supported result of a place has the most of; its id at the end."""
    compared: Sequence[str] = COMPARED.get(entry["backend"], ("optigpu",))
    releases = tuple(_release(entry["versions"].get(package, "")) for package in compared)
    return releases, not entry["warnings"], entry["replicates"], entry["measured_at"], entry["result_id"]


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
