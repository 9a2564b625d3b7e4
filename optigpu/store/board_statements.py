"""The statements that read boards. Building one takes longer than running it, so each shape is built once.

A page of rows is found in one index, which has what filters ask for: `ix_metrics_order`, or `ix_metrics_hardware` where
there is a filter of hardware. Only the rows that are shown are read from their tables.
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


class Shape(NamedTuple):
    """Which rows of a part a statement finds: those that pass the filters (names of OF_METRIC in their order), and if
    it `continues`, that follow a place. `best` leaves only the first row of each class of hardware. `by_class` finds
    the rows of each class that the filter of hardware means by themselves: on PostgreSQL, those that are current."""

    filters: tuple[str, ...]
    continues: bool = False
    best: bool = False
    by_class: bool = False


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
    techniques.board == entries.board,
    techniques.name == bindparam("technique"),
)
_ON_FRONT = exists().where(
    entries.result_id == metrics.result_id, entries.board == metrics.board, entries.pareto.is_(True)
)
OF_ENTRY: dict[str, ColumnElement[bool]] = {
    "hardware": OneOfFew(entries.hardware_class, _HARDWARE.scalar_subquery()),
    "technique": _IN_STACK,
    "backend": entries.backend == bindparam("backend"),
    "min_top1": entries.top1.between(bindparam("min_top1"), 1),
    "max_kld": entries.kld <= bindparam("max_kld"),
    "pareto": entries.pareto.is_(True),
    "clean": entries.warnings == "",
}
"""What a filter asks of an entry, with a parameter of its name."""
OF_METRIC: dict[str, ColumnElement[bool]] = {
    "hardware": OneOfFew(metrics.hardware_class, _HARDWARE.scalar_subquery()),
    "technique": metrics.stack.like(bindparam("in_stack"), escape="\\"),
    "backend": metrics.backend == bindparam("backend"),
    "min_top1": metrics.top1.between(bindparam("min_top1"), 1),
    "max_kld": metrics.kld <= bindparam("max_kld"),
    "pareto": _ON_FRONT,
    "clean": metrics.clean.is_(True),
}
"""The same of a metric of the entry."""
_OF_BOARD = {"board": metrics.board, "metric": metrics.name}
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
def rows(shape: Shape) -> Statement:
    """How many rows a part has, `most` at the most, and the first `limit` of them, in any order."""
    page = _page(shape, ONE).subquery("page")
    return _shown_rows(page, page, ONE)


@lru_cache(SHAPES)
def rows_of_boards(shape: Shape) -> Statement:
    """The same of each of some boards, by their numbers from 1; for PostgreSQL, which SQLite lacks LATERAL for."""
    parts = (
        func.unnest(*(bindparam(f"{name}s", type_=ARRAY(column.type)) for name, column in _OF_BOARD.items()))
        .table_valued(*_OF_BOARD, with_ordinality="part")
        .render_derived("parts")
    )
    each = ONE._replace(board=parts.c.board, metric=parts.c.metric)
    page = _page(shape, each, of=parts).lateral("page")
    return _shown_rows(parts.join(page, true()), page, each).add_columns(parts.c.part)


@lru_cache(SHAPES)
def count(shape: Shape) -> Statement:
    """How many rows a part has, `most` at the most."""
    found = _here(shape, ONE).limit(bindparam("most")).subquery("found")
    return select(func.count()).select_from(found)


@lru_cache(1)
def baselines() -> Statement:
    """The best current results of the empty stack by a backend, on some boards by some metrics, for some classes of
    hardware."""
    here = (
        metrics.board.in_(bindparam("boards", expanding=True)),
        metrics.name.in_(bindparam("metrics", expanding=True)),
        metrics.standing == _written(Standing.CURRENT),
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


def _page(shape: Shape, part: Part, of: FromClause | None = None) -> Select[*Columns]:
    """The ids of the first rows of a part, each with the number of all; `of` has the part's columns."""
    found = _here(shape, part, of)
    order = [found.selected_columns[column.name] for column in ORDER]
    first = _named("found", found.order_by(*order).limit(bindparam("most")), of)
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


def _of_class(filters: Names, part: Part, classes: FromClause) -> tuple[ColumnElement[bool], ...]:
    """The same as `_in_part`, of rows of one of these classes of hardware."""
    others = tuple(name for name in filters if name != "hardware")
    return *_in_part(others, part), metrics.hardware_class == classes.c.name


def _here(shape: Shape, part: Part, of: FromClause | None = None) -> Select[*Columns]:
    """The rows of a part, by the columns of their order."""
    if shape.best:
        return _first_of_classes(shape, part, of)
    if shape.by_class:
        return _rows_of_classes(shape, part, of)
    return _following(shape, select(*ORDER).where(*_in_part(shape.filters, part)))


def _first_of_classes(shape: Shape, part: Part, of: FromClause | None) -> Select[*Columns]:
    number = func.row_number().over(partition_by=metrics.hardware_class, order_by=ORDER)
    known = metrics.hardware_class.is_not(None)  # as all rows of `ix_metrics_hardware`
    here = select(*ORDER, number.label("number")).where(*_in_part(shape.filters, part), known)
    ordered = _named("ordered", here, of)
    first = select(*(ordered.c[column.name] for column in ORDER)).where(ordered.c.number == 1)
    return _following(shape, first)


def _rows_of_classes(shape: Shape, part: Part, of: FromClause | None) -> Select[*Columns]:
    """The first rows of each class, which are next to each other in `ix_metrics_hardware`."""
    classes = _HARDWARE.subquery("classes")
    here = _of_class(shape.filters, part, classes)
    first = _following(shape, select(*ORDER).where(*here)).order_by(*ORDER).limit(bindparam("most"))
    found = first.correlate(classes, *([] if of is None else [of])).lateral("of_class")
    return select(*(found.c[column.name] for column in ORDER)).select_from(classes.join(found, true()))


def _following(shape: Shape, found: Select[*Columns]) -> Select[*Columns]:
    """Those that follow the place, if the page continues."""
    if not shape.continues:
        return found
    order = (found.selected_columns[column.name] for column in ORDER)
    place = tuple_(*(bindparam(column.name, type_=column.type) for column in ORDER))
    return found.where(tuple_(*order) > place)


def _written(standing: Standing) -> ColumnElement[Standing]:
    """As a part of the statement, so that PostgreSQL sees where only current rows are asked for: they have an index."""
    return literal(standing, metrics.standing.type, literal_execute=True)


def _named(name: str, statement: Select[*Columns], of: FromClause | None) -> FromClause:
    """What is selected from; it may use columns of `of`."""
    return statement.subquery(name) if of is None else statement.correlate(of).lateral(name)


def _has_entry(of_entry: Names, *, metric: bool, alone: bool) -> ColumnElement[bool]:
    """Whether a result that is shown passes the filters and has the metric, or else the board's own; of a board that is
    asked for `alone` an invalid one need not have that. The indexes of the order of metrics have all of it."""
    name = bindparam("metric") if metric else boards.primary_metric
    parts = (Part(boards.number, name, _written(standing)) for standing in SHOWN)
    found = or_(*(_one(_passing(of_entry, part)) for part in parts))
    if metric or not alone:
        return found
    invalid = select(entries.result_id).where(
        entries.board == boards.number,
        entries.standing == Standing.INVALID,
        *(OF_ENTRY[name] for name in of_entry),
    )
    of_board = invalid.order_by(entries.variant_digest, entries.hardware_class)  # has an index
    return found | ((cast(boards.invalid, Text) != "{}") & _one(of_board))


def _passing(of_entry: Names, part: Part) -> Select[str]:
    """What passes the filters. Each class of hardware that a filter means is looked for by itself."""
    if "hardware" not in of_entry:
        return select(metrics.result_id).where(*_in_part(of_entry, part))
    return select(metrics.result_id).where(*_of_class(of_entry, part, _HARDWARE.subquery("classes")))


def _one(statement: Select[str]) -> ColumnElement[bool]:
    # PostgreSQL looks for it at each board. What EXISTS it may join, or answer for all boards at once.
    return statement.limit(1).scalar_subquery().is_not(None)
