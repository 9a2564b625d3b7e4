"""Boards: a page of the rows of each, and what is left out of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.orm import Session

from optigpu.documents.views import Baseline, BoardFacts, Standing
from optigpu.store import baselines, board_statements, ranks
from optigpu.store.board_statements import Found, Shape, Values
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.page_text import BoardText
from optigpu.store.ranks import Figure, Place
from optigpu.store.statements import is_postgresql
from optigpu.vocabulary import METRICS, Document


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
    hardware_class: str
    shown: str
    standing: Standing


class Part(NamedTuple):
    """One standing of a board."""

    board: BoardFound
    standing: Standing


class Listed(NamedTuple):
    """Rows, and how many there are on all pages, `number`: more than are counted where they are more."""

    rows: list[RowFound]
    number: int


@dataclass(frozen=True)
class BoardsReader:
    """Reads what a query lists on boards; `filters` are those of entries that are set, with what they ask for. It
    counts no more than `most_counted` rows of a board."""

    session: Session
    query: LeaderboardQuery
    filters: Values
    most_counted: int

    def read(self, boards: Sequence[BoardFound], limit: int) -> tuple[BoardText, ...]:
        """The first rows of each board, one standing after the other, and what is said of the board."""
        of_standings = [self._parts(boards, standing, limit + 1) for standing in self.query.standings]
        read = [_joined(parts) for parts in zip(*of_standings, strict=True)]
        return self._texts(boards, read, limit, None)

    def read_after(self, place: Place, boards: Sequence[BoardFound], limit: int) -> tuple[BoardText, ...]:
        """The rows of boards that follow a place."""
        return self._texts(boards, [self._after(place, board, limit) for board in boards], limit, place)

    def metric(self, board: BoardFound) -> str:
        """What ranks the board."""
        return self.query.metric or board.primary_metric

    def _after(self, place: Place, board: BoardFound, limit: int) -> Listed:
        """The rows that follow a place; all rows of the board are counted."""
        found = [
            self._part(Part(board, standing), limit + 1, place)
            for standing in self.query.standings
            if ranks.GROUPS[standing] >= place.group
        ]
        return Listed(_joined(found).rows, self._count(board, self.filters))

    def _parts(self, boards: Sequence[BoardFound], standing: Standing, limit: int) -> list[Listed]:
        """The first rows of one standing of each board. PostgreSQL finds those of all boards together."""
        if len(boards) == 1 or not is_postgresql(self.session):
            return [self._part(Part(board, standing), limit, None) for board in boards]
        statement = board_statements.rows_of_boards(self._shape(self.filters, standing))
        of_parts = {
            "boards": [board.number for board in boards],
            "metrics": [self.metric(board) for board in boards],
            "standing": standing,
        }
        found: list[list[Found]] = [[] for _ in boards]
        for row in board_statements.run(
            self.session, statement, self._values(self.filters, limit) | of_parts
        ):
            found[row[-1] - 1].append(row[:-1])
        return [_listed(rows, standing) for rows in found]

    def _part(self, part: Part, limit: int, place: Place | None) -> Listed:
        """The first rows of a part; those that follow the place if it is in this part."""
        continues = place is not None and ranks.GROUPS[part.standing] == place.group
        statement = board_statements.rows(self._shape(self.filters, part.standing, continues=continues))
        values = self._values(self.filters, limit) | self._of_part(part)
        if place is not None:
            values |= ranks.parameters(place, METRICS[self.metric(part.board)].better)
        return _listed(board_statements.run(self.session, statement, values), part.standing)

    def _count(self, board: BoardFound, filters: Values) -> int:
        """How many rows there are on all pages; more than `most_counted` where they are more."""
        return sum(
            board_statements.run(
                self.session,
                board_statements.count(self._shape(filters, standing)),
                self._values(filters, 0) | self._of_part(Part(board, standing)),
            )[0][0]
            for standing in self.query.standings
        )

    def _of_part(self, part: Part) -> Values:
        return {
            "board": part.board.number,
            "metric": self.metric(part.board),
            "standing": part.standing,
        }

    def _baselines(
        self, boards: Sequence[BoardFound], read: Sequence[Listed], limit: int
    ) -> dict[int, tuple[Baseline, ...]]:
        """Of the hardware of the rows that are shown."""
        metrics = {board.number: self.metric(board) for board in boards}
        places = {
            (board.number, row.hardware_class)
            for board, listed in zip(boards, read, strict=True)
            for row in listed.rows[:limit]
        }
        return baselines.of_places(self.session, metrics, places) if places else {}

    def _values(self, filters: Values, limit: int) -> Values:
        return filters | {"limit": limit, "most": max(self.most_counted + 1, limit)}

    def _shape(self, filters: Values, standing: Standing, *, continues: bool = False) -> Shape:
        names = tuple(name for name in board_statements.OF_METRIC if name in filters)
        indexed = standing is Standing.CURRENT and is_postgresql(self.session)
        by_class = indexed and "hardware" in names and not self.query.best
        return Shape(names, continues, self.query.best, by_class)

    def _texts(
        self, boards: Sequence[BoardFound], read: Sequence[Listed], limit: int, place: Place | None
    ) -> tuple[BoardText, ...]:
        without = self._baselines(boards, read, limit) if self.query.best else {}
        return tuple(
            self._text(board, listed, without.get(board.number, ()), limit, place)
            for board, listed in zip(boards, read, strict=True)
        )

    def _text(
        self,
        board: BoardFound,
        listed: Listed,
        without: tuple[Baseline, ...],
        limit: int,
        place: Place | None,
    ) -> BoardText:
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
            row_count=None if count > self.most_counted else count,
            not_ranked=_by_reason(board),
            baselines=without,
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
                if warned > self.most_counted:
                    results = f"More than {self.most_counted} results have"
                sentences.append(f"{results} warnings, which clean=true leaves out.")
        return " ".join(sentences) or f"No result has {self.metric(board)}; choose another metric."


def _listed(found: Sequence[Found], standing: Standing) -> Listed:
    """The rows in their order, which a join may have lost."""
    rows = [RowFound._make((*row[1:], standing)) for row in found]
    return Listed(sorted(rows, key=_order), found[0][0] if found else 0)


def _joined(parts: Sequence[Listed]) -> Listed:
    """What one board has of each standing."""
    return Listed([row for part in parts for row in part.rows], sum(part.number for part in parts))


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
