"""One board: a page of its rows, and what is left out of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, func, select
from sqlalchemy.orm import Session

from optigpu.documents.views import Baseline, BoardFacts, Standing
from optigpu.store import ranks
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.page_text import BoardText
from optigpu.store.ranks import Figure, Place
from optigpu.store.tables import BoardRow, LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS

MOST_COUNTED = 1000
"""Rows of a board that are counted: more would take long, and nobody reads so many pages."""

Columns = Select[*tuple[Any, ...]]
Found = Row[*tuple[Any, ...]]
"""One of COLUMNS, in their order."""
COLUMNS = (
    MetricRow.result_id,
    MetricRow.standing,
    MetricRow.value,
    MetricRow.low,
    MetricRow.high,
    MetricRow.summary,
    LeaderboardEntry.superseded,
    LeaderboardEntry.earlier,
    LeaderboardEntry.pareto,
    LeaderboardEntry.shown,
)


@dataclass(frozen=True)
class BoardReader:
    """Reads what a query lists on a board, by this metric; `entries` are the conditions that its filters make."""

    session: Session
    query: LeaderboardQuery
    entries: tuple[ColumnElement[bool], ...]
    board: BoardRow
    metric: str
    baselines: tuple[Baseline, ...] = ()

    def read(self, limit: int, place: Place | None) -> BoardText:
        """The rows after a place, and what is said of the board."""
        # The best of each hardware are few, and finding some of them takes as long as finding all.
        found = self._found(MOST_COUNTED + 1 if self.query.best else limit + 1, place)
        figures = [Figure(row.standing, row.value, row.low, row.high, row.result_id) for row in found[:limit]]
        places = ranks.places(self.board.workload_digest, figures, place)
        is_all = place is None and (self.query.best or len(found) <= limit)
        count = len(found) if is_all else self._count(self.query.standings)
        facts = BoardFacts(
            workload_digest=self.board.workload_digest,
            workload=self.board.document,
            model=self.board.model,
            metric=self.metric,
            unit=METRICS[self.metric].unit,
            better=METRICS[self.metric].better,
            row_count=None if count > MOST_COUNTED else count,
            not_ranked=_by_reason(self.board),
            baselines=self.baselines,
            note=None if count else self._why_empty(),
            next_cursor=places[-1].cursor() if len(found) > limit else None,
        )
        return BoardText(facts, tuple(map(self._text, found[:limit], places)))

    def _found(self, limit: int, place: Place | None) -> Sequence[Found]:
        """So many rows in their order, one standing after the other: the order within each is that of an index."""
        found: list[Found] = []
        for standing in self.query.standings:
            if place is not None and ranks.GROUPS[standing] < place.group:
                continue
            columns: Columns = select(*COLUMNS)
            statement = self._listed(columns, [standing], joined=True)
            if place is not None and ranks.GROUPS[standing] == place.group:
                statement = statement.where(ranks.follows(place, METRICS[self.metric].better))
            statement = statement.order_by(*ranks.ORDER).limit(limit - len(found))
            found.extend(self.session.execute(statement))
            if len(found) == limit:
                break
        return found

    def _count(self, standings: Sequence[Standing], *, clean: bool | None = None) -> int:
        """How many rows there are on all pages, MOST_COUNTED and one at the most."""
        rows = self._listed(select(MetricRow.result_id), standings, joined=False, clean=clean)
        return self.session.execute(
            select(func.count()).select_from(rows.limit(MOST_COUNTED + 1).subquery())
        ).scalar_one()

    def _listed(
        self,
        statement: Columns,
        standings: Sequence[Standing],
        *,
        joined: bool,
        clean: bool | None = None,
    ) -> Columns:
        """The board's rows of these standings; joined with their entries where that is asked for or needed."""
        conditions = list(self.entries)
        if self.query.clean if clean is None else clean:
            conditions.append(LeaderboardEntry.warnings == "")
        if joined or conditions:
            statement = statement.join(LeaderboardEntry, LeaderboardEntry.result_id == MetricRow.result_id)
        standing = (
            MetricRow.standing == standings[0] if len(standings) == 1 else MetricRow.standing.in_(standings)
        )
        here = MetricRow.board == self.board.number, MetricRow.name == self.metric
        if self.query.best:
            conditions.append(MetricRow.result_id.in_(_first_of_hardware(*here, standing, *conditions)))
        return statement.where(*here, standing, *conditions)

    def _text(self, row: Found, place: Place) -> str:
        """A `LeaderboardRow` as JSON."""
        changing = {
            "rank": place.rank,
            "standing": row.standing,
            "superseded": row.superseded,
            "earlier": row.earlier,
            "pareto": row.pareto,
            "metric": self.metric,
        }
        return f'{json.dumps(changing)[:-1]},"value":{row.summary},{row.shown[1:]}'

    def _why_empty(self) -> str:
        """Why a board has no rows: its results are invalid, have warnings, or lack the metric."""
        sentences = []
        if self.board.invalid and not self.query.include_invalid:
            sentences.append(_not_ranked(self.board))
        if self.query.clean and (warned := self._count(self.query.standings, clean=False)):
            have = "result has" if warned == 1 else "results have"
            sentences.append(f"{warned} {have} warnings, which clean=true leaves out.")
        return " ".join(sentences) or f"No result has {self.metric}; choose another metric."


def _first_of_hardware(*conditions: ColumnElement[bool]) -> Select[str]:
    """The ids of the first row of each class of hardware and standing."""
    of_each = LeaderboardEntry.hardware_class, MetricRow.standing
    place = func.row_number().over(partition_by=of_each, order_by=ranks.ORDER).label("place")
    ordered = (
        select(MetricRow.result_id, place)
        .join(LeaderboardEntry, LeaderboardEntry.result_id == MetricRow.result_id)
        .where(*conditions)
        .subquery()
    )
    return select(ordered.c.result_id).where(ordered.c.place == 1)


def _by_reason(board: BoardRow) -> dict[str, int]:
    """How many results are invalid for each reason, the most frequent first: one with two reasons counts for both."""
    counts: dict[str, int] = {}
    for reasons, count in board.invalid.items():
        for reason in reasons.split():
            counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _not_ranked(board: BoardRow) -> str:
    results, reasons = sum(board.invalid.values()), _by_reason(board)
    are = "result is" if results == 1 else "results are"
    named = [f"{reason} ({count})" for reason, count in reasons.items()]
    why = ", ".join(named) if len(named) > 1 else "".join(reasons)
    return f"{results} {are} not ranked: {why}. Show them with include_invalid=true."
