"""One board: a page of its rows, and what is left out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Row, and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from optigpu.documents.views import LeaderboardRow, Standing
from optigpu.store import ranks
from optigpu.store.filters import LeaderboardQuery, conditions
from optigpu.store.ranks import Figure, Place
from optigpu.store.standings import age
from optigpu.store.tables import LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS

_Row = Row[LeaderboardEntry, float, float | None, float | None, bool]


class NotRanked(NamedTuple):
    """How many results are invalid, and how many for each reason: one with two reasons counts for both."""

    results: int
    reasons: dict[str, int]


@dataclass(frozen=True)
class BoardReader:
    """Reads what a query lists on the board with this digest, by this metric."""

    session: Session
    query: LeaderboardQuery
    digest: str
    metric: str

    def rows(self, limit: int, place: Place | None) -> tuple[tuple[LeaderboardRow, ...], str | None]:
        """The rows after a place, and the cursor of those that follow."""
        better = METRICS[self.metric].better
        statement = (
            select(LeaderboardEntry, MetricRow.value, MetricRow.low, MetricRow.high, _is_pareto())
            .join(MetricRow, self._figure())
            .where(*self._listed(clean=self.query.clean))
        )
        if place is not None:
            statement = statement.where(ranks.follows(place, better))
        found = self.session.execute(statement.order_by(*ranks.order(better)).limit(limit + 1)).all()
        entries = [row[0] for row in found[:limit]]
        figures = [Figure(row[0].standing, row[1], row[2], row[3], row[0].result_id) for row in found[:limit]]
        places = ranks.places(self.digest, figures, place)
        variants = _Variants(self._of_same_variants(entries))
        rows = tuple(
            _view(self.metric, entry, at.rank, pareto=bool(row[4]), variants=variants)
            for entry, at, row in zip(entries, places, found, strict=False)
        )
        return rows, places[-1].cursor() if len(found) > limit else None

    def count(self) -> int:
        """How many rows there are on all pages."""
        return self._count(clean=self.query.clean)

    def not_ranked(self) -> NotRanked:
        """The board's invalid results, the most frequent reason first."""
        statement = select(LeaderboardEntry.reasons, func.count()).where(
            *self._of_board(), LeaderboardEntry.standing == Standing.INVALID
        )
        found = self.session.execute(statement.group_by(LeaderboardEntry.reasons)).all()
        counts: dict[str, int] = {}
        for reasons, count in found:
            for reason in reasons.split():
                counts[reason] = counts.get(reason, 0) + count
        by_count = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        return NotRanked(sum(count for _, count in found), dict(by_count))

    def why_empty(self, not_ranked: NotRanked) -> str:
        """Why a board has no rows: its results are invalid, have warnings, or lack the metric."""
        sentences = []
        if not_ranked.results and not self.query.include_invalid:
            sentences.append(_sentence(not_ranked))
        if self.query.clean and (warned := self._count(clean=False)):
            have = "result has" if warned == 1 else "results have"
            sentences.append(f"{warned} {have} warnings, which clean=true leaves out.")
        return " ".join(sentences) or f"No result has {self.metric}; choose another metric."

    def _count(self, *, clean: bool) -> int:
        joined = select(func.count()).select_from(LeaderboardEntry).join(MetricRow, self._figure())
        return self.session.execute(joined.where(*self._listed(clean=clean))).scalar_one()

    def _figure(self) -> ColumnElement[bool]:
        return and_(MetricRow.result_id == LeaderboardEntry.result_id, MetricRow.name == self.metric)

    def _of_board(self) -> list[ColumnElement[bool]]:
        return [LeaderboardEntry.workload_digest == self.digest, *conditions(self.query)]

    def _listed(self, *, clean: bool) -> list[ColumnElement[bool]]:
        without_warnings = [LeaderboardEntry.warnings == ""] if clean else []
        listed = LeaderboardEntry.standing.in_(self.query.standings)
        return [*self._of_board(), *without_warnings, listed]

    def _of_same_variants(
        self, entries: Sequence[LeaderboardEntry]
    ) -> Sequence[Row[str, str, str, dict[str, Any]]]:
        """The board's valid results of the variants of these entries, whatever the filters are."""
        statement = select(
            LeaderboardEntry.variant_digest,
            LeaderboardEntry.hardware_class,
            LeaderboardEntry.backend,
            LeaderboardEntry.versions,
        ).where(
            LeaderboardEntry.workload_digest == self.digest,
            LeaderboardEntry.source == self.query.source,
            LeaderboardEntry.standing != Standing.INVALID,
            LeaderboardEntry.variant_digest.in_({entry.variant_digest for entry in entries}),
        )
        return self.session.execute(statement).all()


class _Variants:
    """When variants were measured elsewhere and before."""

    def __init__(self, found: Sequence[Row[str, str, str, dict[str, Any]]]) -> None:
        self._ages: dict[tuple[str, str], list[tuple[tuple[int, ...], ...]]] = {}
        for variant, hardware, backend, versions in found:
            self._ages.setdefault((variant, hardware), []).append(age(backend, versions))

    def earlier(self, entry: LeaderboardEntry) -> int:
        """How many other valid results the place of a current one has."""
        measured = self._ages.get((entry.variant_digest, entry.hardware_class), ())
        return len(measured) - 1 if entry.standing is Standing.CURRENT else 0

    def is_superseded(self, entry: LeaderboardEntry) -> bool:
        """Whether the variant was measured with later versions on other hardware."""
        own = age(entry.backend, entry.versions)
        return any(
            later > own
            for (variant, hardware), ages in self._ages.items()
            if (variant, hardware != entry.hardware_class) == (entry.variant_digest, True)
            for later in ages
        )


def _is_pareto() -> ColumnElement[bool]:
    """No other current row of the same workload, hardware, device and source is as fast and as small, and better in
    one."""
    other = aliased(LeaderboardEntry)
    here = LeaderboardEntry
    dominated = exists().where(
        other.standing == Standing.CURRENT,
        other.workload_digest == here.workload_digest,
        other.hardware_class == here.hardware_class,
        other.device == here.device,
        other.source == here.source,
        other.score >= here.score,
        other.size_bytes <= here.size_bytes,
        or_(other.score > here.score, other.size_bytes < here.size_bytes),
    )
    return (~dominated).label("pareto")


def _sentence(not_ranked: NotRanked) -> str:
    are = "result is" if not_ranked.results == 1 else "results are"
    named = [f"{reason} ({count})" for reason, count in not_ranked.reasons.items()]
    why = ", ".join(named) if len(named) > 1 else "".join(not_ranked.reasons)
    return f"{not_ranked.results} {are} not ranked: {why}. Show them with include_invalid=true."


def _view(
    metric: str, entry: LeaderboardEntry, rank: int | None, *, pareto: bool, variants: _Variants
) -> LeaderboardRow:
    known = entry.score is not None and entry.size_bytes is not None
    summary = entry.summary
    return LeaderboardRow(
        rank=rank,
        standing=entry.standing,
        superseded=variants.is_superseded(entry),
        earlier=variants.earlier(entry),
        result_id=entry.result_id,
        job_id=summary["job_id"],
        source=entry.source,
        measured_at=entry.measured_at,
        workload=summary["workload"],
        workload_digest=entry.workload_digest,
        variant_digest=entry.variant_digest,
        model=entry.model,
        label=summary["label"],
        techniques=summary["techniques"],
        backend=entry.backend,
        device=entry.device,
        hardware=entry.hardware_class,
        versions=entry.versions,
        metric=metric,
        value=summary["metrics"][metric],
        weight_bytes=_value(summary["metrics"], "weight_bytes"),
        peak_bytes=_value(summary["metrics"], "peak_bytes"),
        top1_agreement=_value(summary["metrics"], "top1_agreement"),
        kld_mean=_value(summary["metrics"], "kld_mean"),
        j_per_token=_value(summary["metrics"], "j_per_token"),
        pareto=pareto if known and entry.standing is Standing.CURRENT else None,
        warnings=tuple(entry.warnings.split()),
        reasons=tuple(entry.reasons.split()),
        notes=summary["notes"],
    )


def _value(metrics: dict[str, Any], name: str) -> float | None:
    value: float | None = metrics.get(name, {}).get("value")
    return value
