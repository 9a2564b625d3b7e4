"""What the leaderboard can be filtered by, and the names that a filter can have."""

from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, bindparam, exists, func, literal, or_, select, union
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from optigpu.documents.queries import LeaderboardQuery
from optigpu.store.statements import like_part
from optigpu.store.tables import (
    BoardRow,
    EntryTechnique,
    KnownName,
    LeaderboardEntry,
    MetricRow,
    Worker,
)

DIGEST_LENGTH = 64
Values = dict[str, object]
"""What a statement asks for, by the names of its parameters."""

boards, entries, metrics = BoardRow.__table__.c, LeaderboardEntry.__table__.c, MetricRow.__table__.c
techniques = EntryTechnique.__table__.c
OF_BOARD: dict[str, ColumnElement[bool]] = {
    "source": boards.source == bindparam("source"),
    "workload": boards.workload == bindparam("workload"),
    "digest": boards.workload_digest == bindparam("digest"),
    "model": boards.model == bindparam("model"),
    "after": boards.newest < bindparam("after"),
}
"""What a filter asks of a board, with a parameter of its name."""


def _of_either(columns: ReadOnlyColumnCollection[str, Any]) -> dict[str, ColumnElement[bool]]:
    """Of columns that entries and their metrics both have."""
    return {
        "hardware": func.lower(columns.hardware_class).like(bindparam("hardware"), escape="\\"),
        "backend": columns.backend == bindparam("backend"),
        "min_top1": columns.top1.between(bindparam("min_top1"), 1),
        "max_kld": columns.kld <= bindparam("max_kld"),
    }


OF_ENTRY: dict[str, ColumnElement[bool]] = _of_either(entries) | {
    "technique": exists().where(
        techniques.result_id == entries.result_id, techniques.name == bindparam("technique")
    ),
    "pareto": entries.pareto.is_(True),
    "clean": entries.warnings == "",
}
"""The same of an entry."""
OF_METRIC: dict[str, ColumnElement[bool]] = _of_either(metrics) | {
    "technique": metrics.stack.like(bindparam("in_stack"), escape="\\"),
    "pareto": exists().where(entries.result_id == metrics.result_id, entries.pareto.is_(True)),
    "clean": metrics.clean.is_(True),
    "stack": metrics.stack == bindparam("stack"),
}
"""The same of a metric of the entry, and its whole stack: one index of metrics has all of it."""
_KNOWN = union(select(KnownName.filter, KnownName.name), select(literal("hardware"), Worker.hardware_class))


def of_board(query: LeaderboardQuery, after: str | None) -> Values:
    """What a board has to be: the filters of OF_BOARD that are set."""
    by_digest = query.workload is not None and len(query.workload) == DIGEST_LENGTH
    asked = {
        "source": query.source,
        "workload": None if by_digest else query.workload,
        "digest": query.workload if by_digest else None,
        "model": query.model,
        "after": after,
    }
    return {name: value for name, value in asked.items() if value is not None}


def of_entry(query: LeaderboardQuery) -> Values:
    """What an entry of such a board has to be, whatever its standing and its warnings: the same of OF_ENTRY, and for
    OF_METRIC the stack."""
    technique = query.technique and query.technique.lower()
    asked = {
        "hardware": query.hardware and like_part(query.hardware),
        "technique": technique,
        "in_stack": technique and like_part(f" {technique} "),
        "backend": query.backend,
        "min_top1": query.min_top1,
        "max_kld": query.max_kld,
        "pareto": query.pareto or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def has_workload(session: Session, workload: str) -> bool:
    """Whether a result has this kind of workload, or this workload's digest."""
    named = or_(BoardRow.workload_digest == workload, BoardRow.workload == workload)
    return session.scalar(select(exists().where(named))) or False


def names(session: Session, filter_: str) -> list[str]:
    """The names of this filter that results have had, sorted."""
    return sorted(session.scalars(select(KnownName.name).where(KnownName.filter == filter_)))


def known(session: Session) -> dict[str, list[str]]:
    """The names of each filter, sorted."""
    found: dict[str, list[str]] = defaultdict(list)
    for filter_, name in sorted(session.connection().execute(_KNOWN)):
        found[filter_].append(name)
    return found
