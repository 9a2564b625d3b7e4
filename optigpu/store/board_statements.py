"""The statements that read boards. Building one takes longer than running it, so each shape is built once.

A page of rows is found in `ix_metrics_order` alone, which has what filters ask for, and only the rows that are shown
are read from their tables.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Exists,
    Row,
    Select,
    bindparam,
    exists,
    func,
    select,
    tuple_,
)
from sqlalchemy.orm import Session

from optigpu.documents.views import Standing
from optigpu.store.tables import BoardRow, EntryTechnique, KnownName, LeaderboardEntry, MetricRow

SHAPES = 4096
"""Statements that are kept; those that were not asked for lately are built again."""
SHOWN = (Standing.CURRENT, Standing.INVALID)
"""A board is listed for what it has of these: earlier results are the history of a current one."""

Values = dict[str, object]
"""What a statement asks for, by the names of its parameters."""
Columns = tuple[Any, ...]
Statement = Select[*Columns]
Found = Row[*Columns]
Names = tuple[str, ...]
"""Filters that are set, in the order of OF_ENTRY or of OF_BOARD."""

metrics, entries, boards = MetricRow.__table__.c, LeaderboardEntry.__table__.c, BoardRow.__table__.c
techniques, names = EntryTechnique.__table__.c, KnownName.__table__.c

_HARDWARE = select(names.name).where(
    names.filter == "hardware", func.lower(names.name).like(bindparam("hardware"), escape="\\")
)
_IN_STACK = exists().where(
    techniques.result_id == entries.result_id,
    techniques.board == boards.number,
    techniques.name == bindparam("technique"),
)
_ON_FRONT = exists().where(
    entries.result_id == metrics.result_id, entries.board == metrics.board, entries.pareto.is_(True)
)
OF_ENTRY: dict[str, ColumnElement[bool]] = {
    "hardware": entries.hardware_class.in_(_HARDWARE),
    "technique": _IN_STACK,
    "backend": entries.backend == bindparam("backend"),
    "min_top1": entries.top1.between(bindparam("min_top1"), 1),
    "max_kld": entries.kld <= bindparam("max_kld"),
    "pareto": entries.pareto.is_(True),
    "clean": entries.warnings == "",
}
"""What a filter asks of an entry, with a parameter of its name."""
OF_METRIC: dict[str, ColumnElement[bool]] = {
    "hardware": metrics.hardware_class.in_(_HARDWARE),
    "technique": metrics.stack.like(bindparam("in_stack"), escape="\\"),
    "backend": metrics.backend == bindparam("backend"),
    "min_top1": metrics.top1.between(bindparam("min_top1"), 1),
    "max_kld": metrics.kld <= bindparam("max_kld"),
    "pareto": _ON_FRONT,
    "clean": metrics.clean.is_(True),
}
"""The same of a metric of the entry."""
OF_BOARD: dict[str, ColumnElement[bool]] = {
    "source": boards.source == bindparam("source"),
    "workload": boards.workload == bindparam("workload"),
    "digest": boards.workload_digest == bindparam("digest"),
    "model": boards.model == bindparam("model"),
    "after": boards.newest < bindparam("after"),
}
"""The same of a board."""
ORDER = (metrics.unsure, metrics.place, metrics.result_id)
"""The order of the metrics of one standing: an index of the table has it."""


def run(session: Session, statement: Statement, values: Values) -> Sequence[Found]:
    """What it finds: rows of columns, for which no object of the session is looked for."""
    return session.connection().execute(statement, values).all()


@lru_cache(SHAPES)
def rows(filters: Names, *, continues: bool = False, best: bool = False) -> Statement:
    """How many rows of a board have a standing, `most` at the most, and the first `limit` of them, in any order; if it
    `continues`, of those that follow a place. `best` leaves only the first row of each class of hardware."""
    found = select(*ORDER).where(*_here(filters, best=best))
    if continues:
        place = tuple_(*(bindparam(column.name, type_=column.type) for column in ORDER))
        found = found.where(tuple_(*ORDER) > place)
    first = found.order_by(*ORDER).limit(bindparam("most")).subquery("found")
    counted = select(first.c.result_id, func.count().over().label("number"))
    page = counted.order_by(*first.c).limit(bindparam("limit")).subquery("page")
    here = (metrics.result_id == page.c.result_id) & (metrics.name == bindparam("metric"))
    return (
        select(
            *(page.c.number, metrics.result_id, metrics.unsure, metrics.place),
            *(metrics.value, metrics.low, metrics.high, metrics.summary),
            *(entries.superseded, entries.earlier, entries.pareto, entries.shown),
        )
        .select_from(page)
        .join(MetricRow.__table__, here)
        .join(LeaderboardEntry.__table__, entries.result_id == page.c.result_id)
    )


@lru_cache(SHAPES)
def count(filters: Names, *, best: bool = False) -> Statement:
    """How many rows of a board have a standing, `most` at the most."""
    found = (
        select(metrics.result_id).where(*_here(filters, best=best)).limit(bindparam("most")).subquery("found")
    )
    return select(func.count()).select_from(found)


@lru_cache(SHAPES)
def listed(of_board: Names, of_entry: Names, *, metric: bool, has_entries: bool) -> Statement:
    """Boards, the one with the newest result first; if `has_entries`, those with a current or an invalid result that
    passes the filters and has the metric."""
    statement = select(*BoardRow.__table__.c).where(*(OF_BOARD[name] for name in of_board))
    if has_entries and (of_entry or metric):
        statement = statement.where(_has_entry(of_entry, metric=metric))
    return statement.order_by(boards.newest.desc()).limit(bindparam("limit"))


def _here(filters: Names, *, best: bool = False) -> tuple[ColumnElement[bool], ...]:
    here = (
        metrics.board == bindparam("board"),
        metrics.name == bindparam("metric"),
        metrics.standing == bindparam("standing"),
        *(OF_METRIC[name] for name in filters),
    )
    return (*here, _is_first_of_hardware(here)) if best else here


def _is_first_of_hardware(here: Sequence[ColumnElement[bool]]) -> ColumnElement[bool]:
    number = func.row_number().over(partition_by=metrics.hardware_class, order_by=ORDER)
    ordered = select(metrics.result_id, number.label("number")).where(*here).subquery("ordered")
    return metrics.result_id.in_(select(ordered.c.result_id).where(ordered.c.number == 1))


def _has_entry(of_entry: Names, *, metric: bool) -> Exists:
    if not of_entry:
        measured = metrics.board == boards.number, metrics.name == bindparam("metric")
        return exists().where(*measured, _shown(metrics.standing))
    here = entries.board == boards.number, _shown(entries.standing)
    statement = exists().where(*here, *(OF_ENTRY[name] for name in of_entry))
    if not metric:
        return statement
    measured = metrics.result_id == entries.result_id, metrics.name == bindparam("metric")
    return statement.where(exists().where(*measured))


def _shown(standing: ColumnElement[Standing]) -> ColumnElement[bool]:
    # One by one: a list would be written anew for each call.
    first, second = SHOWN
    return (standing == first) | (standing == second)
