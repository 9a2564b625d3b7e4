"""Boards: a page of the rows of each, and what is left out of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.orm import Session

from optigpu.documents.views import Baseline, BoardFacts, Standing
from optigpu.store import board_statements, ranks
from optigpu.store.board_statements import Found, Values
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.page_text import BoardText
from optigpu.store.ranks import Figure, Place
from optigpu.store.statements import like_part
from optigpu.vocabulary import METRICS, Document

MOST_COUNTED = 100
"""Rows of a board that are counted: more would take long, and nobody reads so many pages."""


class BoardFound(NamedTuple):
    """A board, by the columns of its table."""

    number: int
    workload_digest: str
    source: str
    workload: str
    model: str | None
    primary_metric: str
    document: Document
    newest: str
    invalid: dict[str, int]


class RowFound(NamedTuple):
    """A row of a board, by the columns of `board_statements.rows`, after their first one."""

    result_id: str
    unsure: bool
    place: float
    value: float
    low: float | None
    high: float | None
    summary: str
    superseded: bool
    earlier: int
    pareto: bool | None
    shown: str
    standing: Standing


class Listed(NamedTuple):
    """Rows of a board, and how many there are on all pages, `number`: more than MOST_COUNTED where they are more."""

    rows: list[RowFound]
    number: int


@dataclass(frozen=True)
class BoardsReader:
    """Reads what a query lists on boards; `filters` are those of entries that are set, with what they ask for."""

    session: Session
    query: LeaderboardQuery
    filters: Values
    baselines: Mapping[int, tuple[Baseline, ...]]

    def read(self, board: BoardFound, limit: int, place: Place | None) -> BoardText:
        """The rows of a board, those after a place if one is given, and what is said of the board."""
        listed = self._first(board, limit + 1) if place is None else self._after(board, limit + 1, place)
        return self._text(board, listed, limit, place)

    def metric(self, board: BoardFound) -> str:
        """What ranks the board."""
        return self.query.metric or board.primary_metric

    def _first(self, board: BoardFound, limit: int) -> Listed:
        """The first rows, one standing after the other; all standings are counted."""
        statement = board_statements.rows(self._names(self.filters), best=self.query.best)
        found: list[RowFound] = []
        number = 0
        for standing in self.query.standings:
            values = self._values(board, standing, self.filters, limit)
            here, count = _rows(board_statements.run(self.session, statement, values), standing)
            found, number = found + here, number + count
        return Listed(found[:limit], number)

    def _after(self, board: BoardFound, limit: int, place: Place) -> Listed:
        """The rows that follow a place."""
        found: list[RowFound] = []
        for standing in self.query.standings:
            group = ranks.GROUPS[standing]
            if group < place.group or len(found) >= limit:
                continue
            statement = board_statements.rows(
                self._names(self.filters), continues=group == place.group, best=self.query.best
            )
            at = ranks.parameters(place, METRICS[self.metric(board)].better)
            values = self._values(board, standing, self.filters, limit) | at
            found += _rows(board_statements.run(self.session, statement, values), standing).rows
        return Listed(found[:limit], self._count(board, self.filters))

    def _count(self, board: BoardFound, filters: Values) -> int:
        """How many rows there are on all pages; more than MOST_COUNTED where they are more."""
        statement = board_statements.count(self._names(filters), best=self.query.best)
        return sum(
            board_statements.run(self.session, statement, self._values(board, standing, filters))[0][0]
            for standing in self.query.standings
        )

    def _values(self, board: BoardFound, standing: Standing, filters: Values, limit: int = 0) -> Values:
        technique = filters.get("technique")
        return filters | {
            "board": board.number,
            "metric": self.metric(board),
            "standing": standing,
            "in_stack": None if technique is None else like_part(f" {technique} "),
            "limit": limit,
            "most": max(MOST_COUNTED + 1, limit),
        }

    def _names(self, filters: Values) -> tuple[str, ...]:
        return tuple(name for name in board_statements.OF_METRIC if name in filters)

    def _text(self, board: BoardFound, listed: Listed, limit: int, place: Place | None) -> BoardText:
        found, count = listed
        figures = [Figure(row.standing, row.value, row.low, row.high, row.result_id) for row in found[:limit]]
        places = ranks.places(board.workload_digest, figures, place)
        metric = self.metric(board)
        facts = BoardFacts(
            workload_digest=board.workload_digest,
            workload=board.document,
            model=board.model,
            metric=metric,
            unit=METRICS[metric].unit,
            better=METRICS[metric].better,
            row_count=None if count > MOST_COUNTED else count,
            not_ranked=_by_reason(board),
            baselines=self.baselines.get(board.number, ()),
            note=None if count else self._why_empty(board),
            next_cursor=places[-1].cursor() if len(found) > limit else None,
        )
        return BoardText(
            facts, tuple(_row(row, place, metric) for row, place in zip(found, places, strict=False))
        )

    def _why_empty(self, board: BoardFound) -> str:
        """Why a board has no rows: its results are invalid, have warnings, or lack the metric."""
        sentences = []
        if board.invalid and not self.query.include_invalid:
            sentences.append(_not_ranked(board))
        if self.query.clean:
            filters = {name: value for name, value in self.filters.items() if name != "clean"}
            if warned := self._count(board, filters):
                results = "1 result has" if warned == 1 else f"{warned} results have"
                if warned > MOST_COUNTED:
                    results = f"More than {MOST_COUNTED} results have"
                sentences.append(f"{results} warnings, which clean=true leaves out.")
        return " ".join(sentences) or f"No result has {self.metric(board)}; choose another metric."


def _rows(found: Sequence[Found], standing: Standing) -> Listed:
    """The rows in their order, which a join may have lost."""
    rows = [RowFound._make((*row[1:], standing)) for row in found]
    return Listed(sorted(rows, key=_order), found[0][0] if found else 0)


def _order(row: RowFound) -> tuple[bool, float, str]:
    return row.unsure, row.place, row.result_id


def _row(row: RowFound, place: Place, metric: str) -> str:
    """A `LeaderboardRow` as JSON."""
    changing = (
        f'"rank":{"null" if place.rank is None else place.rank},"standing":"{row.standing}",'
        f'"superseded":{_JSON[row.superseded]},"earlier":{row.earlier},"pareto":{_JSON[row.pareto]},'
        f'"metric":"{metric}"'
    )
    return f'{{{changing},"value":{row.summary},{row.shown[1:]}'


_JSON = {True: "true", False: "false", None: "null"}


def _by_reason(board: BoardFound) -> dict[str, int]:
    """How many results are invalid for each reason, the most frequent first: one with two reasons counts for both."""
    counts: dict[str, int] = {}
    for reasons, count in board.invalid.items():
        for reason in reasons.split():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _not_ranked(board: BoardFound) -> str:
    results, reasons = sum(board.invalid.values()), _by_reason(board)
    are = "result is" if results == 1 else "results are"
    named = [f"{reason} ({count})" for reason, count in reasons.items()]
    why = ", ".join(named) if len(named) > 1 else "".join(reasons)
    return f"{results} {are} not ranked: {why}. Show them with include_invalid=true."
