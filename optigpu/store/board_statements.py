"""The statements that read boards. Building one takes longer than running it, so each shape is built once.

A page of rows is found in `ix_metrics_order` alone, which has what filters ask for, and only the rows that are shown
are read from their tables.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    FromClause,
    Row,
    Select,
    Text,
    bindparam,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import Session

from optigpu.documents.views import Standing
from optigpu.store.entries import stack_text
from optigpu.store.statements import OneOfFew
from optigpu.store.tables import BoardRow, EntryTechnique, KnownName, LeaderboardEntry, MetricRow


class Part(NamedTuple):
    """A standing of a board with a metric: columns of a statement, or parameters."""

    board: ColumnElement[int]
    metric: ColumnElement[str]
    standing: ColumnElement[Standing]


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

_HARDWARE = (
    select(names.name)
    .where(names.filter == "hardware", func.lower(names.name).like(bindparam("hardware"), escape="\\"))
    .scalar_subquery()
)
_IN_STACK = exists().where(
    techniques.result_id == entries.result_id,
    techniques.board == entries.board,
    techniques.name == bindparam("technique"),
)
_ON_FRONT = exists().where(
    entries.result_id == metrics.result_id, entries.board == metrics.board, entries.pareto.is_(True)
)
OF_ENTRY: dict[str, ColumnElement[bool]] = {
    "hardware": OneOfFew(entries.hardware_class, _HARDWARE),
    "technique": _IN_STACK,
    "backend": entries.backend == bindparam("backend"),
    "min_top1": entries.top1.between(bindparam("min_top1"), 1),
    "max_kld": entries.kld <= bindparam("max_kld"),
    "pareto": entries.pareto.is_(True),
    "clean": entries.warnings == "",
}
"""What a filter asks of an entry, with a parameter of its name."""
OF_METRIC: dict[str, ColumnElement[bool]] = {
    "hardware": OneOfFew(metrics.hardware_class, _HARDWARE),
    "technique": metrics.stack.like(bindparam("in_stack"), escape="\\"),
    "backend": metrics.backend == bindparam("backend"),
    "min_top1": metrics.top1.between(bindparam("min_top1"), 1),
    "max_kld": metrics.kld <= bindparam("max_kld"),
    "pareto": _ON_FRONT,
    "clean": metrics.clean.is_(True),
}
"""The same of a metric of the entry."""
_PART = {"board": metrics.board, "metric": metrics.name, "standing": metrics.standing}
ONE = Part(
    bindparam("board", type_=metrics.board.type),
    bindparam("metric", type_=metrics.name.type),
    # As a literal, since PostgreSQL plans anew each time where it cannot tell that current rows are few.
    bindparam("standing", type_=metrics.standing.type, literal_execute=True),
)
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
    """How many rows a part has, `most` at the most, and the first `limit` of them, in any order; if it `continues`, of
    those that follow a place. `best` leaves only the first row of each class of hardware."""
    page = _page(filters, ONE, continues=continues, best=best).subquery("page")
    return _shown_rows(page, page, ONE)


@lru_cache(SHAPES)
def rows_of_parts(filters: Names, *, best: bool = False) -> Statement:
    """The same of each part of `parts`, by their numbers from 1; for PostgreSQL, which SQLite lacks LATERAL for."""
    parts = (
        func.unnest(*(bindparam(f"{name}s", type_=ARRAY(column.type)) for name, column in _PART.items()))
        .table_valued(*_PART, with_ordinality="part")
        .render_derived("parts")
    )
    each = Part(parts.c.board, parts.c.metric, parts.c.standing)
    page = _page(filters, each, of=parts, best=best).lateral("page")
    return _shown_rows(parts.join(page, true()), page, each).add_columns(parts.c.part)


@lru_cache(SHAPES)
def count(filters: Names, *, best: bool = False) -> Statement:
    """How many rows a part has, `most` at the most."""
    found = _here(filters, ONE, best=best).limit(bindparam("most")).subquery("found")
    return select(func.count()).select_from(found)


@lru_cache(1)
def baselines() -> Statement:
    """The best current results of the empty stack by a backend, on some boards by some metrics, for some classes of
    hardware."""
    here = (
        metrics.board.in_(bindparam("boards", expanding=True)),
        metrics.name.in_(bindparam("metrics", expanding=True)),
        metrics.standing == Standing.CURRENT,
        metrics.hardware_class.in_(bindparam("hardware", expanding=True)),
        metrics.backend == bindparam("backend"),
        metrics.stack == stack_text(()),
    )
    place = metrics.board, metrics.name, metrics.hardware_class
    number = func.row_number().over(partition_by=place, order_by=ORDER)
    ordered = select(metrics.result_id, metrics.name, number.label("number")).where(*here).subquery("ordered")
    same = (metrics.result_id == ordered.c.result_id) & (metrics.name == ordered.c.name)
    return (
        select(*place, metrics.summary, entries.result_id, entries.device)
        .select_from(ordered)
        .join(MetricRow.__table__, same)
        .join(LeaderboardEntry.__table__, entries.result_id == ordered.c.result_id)
        .where(ordered.c.number == 1)
        .order_by(entries.result_id)
    )


@lru_cache(SHAPES)
def listed(of_board: Names, of_entry: Names, *, metric: bool, has_entries: bool) -> Statement:
    """Boards, the one with the newest result first; if `has_entries`, those with a current or an invalid result that
    passes the filters and has the metric."""
    statement = select(*BoardRow.__table__.c).where(*(OF_BOARD[name] for name in of_board))
    if has_entries and (of_entry or metric):
        statement = statement.where(_has_entry(of_entry, metric=metric, alone="digest" in of_board))
    return statement.order_by(boards.newest.desc()).limit(bindparam("limit"))


def _page(
    filters: Names,
    part: Part,
    *,
    of: FromClause | None = None,
    continues: bool = False,
    best: bool = False,
) -> Select[*Columns]:
    """The ids of the first rows of a part, each with the number of all; `of` has the part's columns."""
    found = _here(filters, part, of=of, best=best)
    order = [found.selected_columns[column.name] for column in ORDER]
    if continues:
        place = tuple_(*(bindparam(column.name, type_=column.type) for column in ORDER))
        found = found.where(tuple_(*order) > place)
    ordered = found.order_by(*order).limit(bindparam("most"))
    first = _named("found", ordered, of)
    counted = select(first.c.result_id, func.count().over().label("number"))
    return counted.order_by(*first.c).limit(bindparam("limit")).correlate(of)


def _shown_rows(found: FromClause, page: FromClause, part: Part) -> Select[*Columns]:
    here = (metrics.result_id == page.c.result_id) & (metrics.name == part.metric)
    return (
        select(
            *(page.c.number, metrics.result_id, metrics.unsure, metrics.place),
            *(metrics.value, metrics.low, metrics.high, metrics.summary),
            *(entries.superseded, entries.earlier, entries.pareto, entries.hardware_class, entries.shown),
        )
        .select_from(found)
        .join(MetricRow.__table__, here)
        .join(LeaderboardEntry.__table__, entries.result_id == page.c.result_id)
    )


def _in_part(filters: Names, part: Part) -> tuple[ColumnElement[bool], ...]:
    return (
        metrics.board == part.board,
        metrics.name == part.metric,
        metrics.standing == part.standing,
        *(OF_METRIC[name] for name in filters),
    )


def _here(
    filters: Names, part: Part, *, of: FromClause | None = None, best: bool = False
) -> Select[*Columns]:
    """The rows of a part, by the columns of their order."""
    here = _in_part(filters, part)
    if not best:
        return select(*ORDER).where(*here)
    number = func.row_number().over(partition_by=metrics.hardware_class, order_by=ORDER)
    ordered = _named("ordered", select(*ORDER, number.label("number")).where(*here), of)
    return select(*(ordered.c[column.name] for column in ORDER)).where(ordered.c.number == 1)


def _named(name: str, statement: Select[*Columns], of: FromClause | None) -> FromClause:
    """What is selected from; it may use columns of `of`."""
    return statement.subquery(name) if of is None else statement.correlate(of).lateral(name)


def _has_entry(of_entry: Names, *, metric: bool, alone: bool) -> ColumnElement[bool]:
    """Whether a result that is shown passes the filters and has the metric, or else the board's own; of a board that is
    asked for `alone` an invalid one need not have that. `ix_metrics_order` has all of it."""
    name = bindparam("metric") if metric else boards.primary_metric
    parts = (Part(boards.number, name, literal(standing)) for standing in SHOWN)
    found = or_(*(_one(select(metrics.result_id).where(*_in_part(of_entry, part))) for part in parts))
    if metric or not alone:
        return found
    invalid = select(entries.result_id).where(
        entries.board == boards.number,
        entries.standing == Standing.INVALID,
        *(OF_ENTRY[name] for name in of_entry),
    )
    of_board = invalid.order_by(entries.variant_digest, entries.hardware_class)  # has an index
    return found | ((cast(boards.invalid, Text) != "{}") & _one(of_board))


def _one(statement: Select[str]) -> ColumnElement[bool]:
    # PostgreSQL looks for it at each board. What EXISTS it may join, or answer for all boards at once.
    return statement.limit(1).scalar_subquery().is_not(None)
