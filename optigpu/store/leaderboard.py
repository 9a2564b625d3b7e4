"""The leaderboard: the current result of each variant on each class of hardware, best first.

Order: rows whose metric has a 95% interval, then rows without one; within each the metric's value, best first, and
equal values by result id.

Ranks: a row shares the rank of the row before it if its interval touches the interval of the first row of that rank;
else its rank is its place in the list (1, 1, 3). Rows are compared with the first row of a rank only, so that a chain
of overlaps does not put everything on one rank. Rows without an interval share one rank, below all others: their
precision is unknown, so they outrank no row. What is counted (COUNTED_METRICS, such as `weight_bytes`) is exact without
one. A cursor holds that first row's interval, so ranks continue across pages.
"""

import math
from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Row, Select, SQLColumnExpression, and_, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from optigpu.documents.result import Result
from optigpu.documents.views import LeaderboardPage, LeaderboardRow
from optigpu.store.cursors import decode_cursor, encode_cursor
from optigpu.store.statements import insert_into
from optigpu.store.tables import LeaderboardEntry, MetricRow
from optigpu.vocabulary import METRICS, Better, DeviceKind, Frozen, NotFoundError

_Statement = Select[LeaderboardEntry, float, float | None, float | None, bool]
_Row = Row[LeaderboardEntry, float, float | None, float | None, bool]

ROW_IDENTITY = ("workload_digest", "variant_digest", "hardware_class", "source")
DIGEST_LENGTH = 64


class LeaderboardQuery(Frozen):
    """What to list. None leaves a filter out.

    `workload` is a kind or a workload's digest; `hardware` is part of a hardware class, in any case of letters;
    `technique` must be in the stack. `min_top1` (a share, of `top1_agreement`) and `max_kld` (nats, of `kld_mean`)
    leave out what is worse, and what has no such figure. Sources are never mixed: a device's own report is not ranked
    with a worker's.
    """

    metric: str
    workload: str | None = None
    model: str | None = None
    hardware: str | None = None
    technique: str | None = None
    backend: str | None = None
    min_top1: float | None = None
    max_kld: float | None = None
    source: str = "worker"
    limit: int = 50
    cursor: str | None = None


class _Place(NamedTuple):
    """The end of a page: the last row, its position, and its rank with the interval of the rank's first row or null."""

    value: float
    result_id: str
    position: int
    rank: int
    low: float | None
    high: float | None

    def has_rank_of(self, low: float | None, high: float | None) -> bool:
        """Whether the next row, with this interval, shares the rank."""
        if low is None or high is None or self.low is None or self.high is None:
            return low is None and self.low is None
        return low <= self.high and self.low <= high


def query(session: Session, query: LeaderboardQuery) -> LeaderboardPage:
    """A page of the leaderboard. Raises NotFoundError for an unknown metric, CursorError."""
    if query.metric not in METRICS:
        raise NotFoundError(f"There is no metric {query.metric!r}; the metrics are {', '.join(METRICS)}.")
    metric = METRICS[query.metric]
    place = _Place(*decode_cursor(query.cursor, *_KINDS)) if query.cursor else None
    found = session.execute(_statement(query, metric.better, place)).all()
    places = _places(found[: query.limit], place)
    return LeaderboardPage(
        metric=query.metric,
        unit=metric.unit,
        better=metric.better,
        rows=tuple(_view(query.metric, row, at.rank) for row, at in zip(found, places, strict=False)),
        next_cursor=encode_cursor(*places[-1]) if len(found) > query.limit else None,
    )


def enter(session: Session, result: Result) -> None:
    """Puts a valid result in its place, unless a later one is there; an invalid one has no place."""
    if not result.verdict.valid:
        return
    row = _entry(result)
    insert = insert_into(session, LeaderboardEntry).values(row)
    changes = {name: insert.excluded[name] for name in row if name not in ROW_IDENTITY}
    not_older = insert.excluded.measured_at >= LeaderboardEntry.measured_at
    session.execute(insert.on_conflict_do_update(index_elements=ROW_IDENTITY, set_=changes, where=not_older))


_NUMBER = (int, float)
_KINDS = (_NUMBER, str, int, int, (*_NUMBER, NoneType), (*_NUMBER, NoneType))


def _statement(query: LeaderboardQuery, better: Better, place: _Place | None) -> _Statement:
    """Selects the page from narrow rows; only the page's entries are read in full and compared with the others."""
    page = _page(query, better, place).subquery()
    return (
        select(LeaderboardEntry, page.c.value, page.c.low, page.c.high, _is_pareto())
        .join(page, and_(*(getattr(LeaderboardEntry, name) == page.c[name] for name in ROW_IDENTITY)))
        .order_by(*_order(page.c.low, page.c.value, page.c.result_id, better))
    )


def _page(query: LeaderboardQuery, better: Better, place: _Place | None) -> Select[*tuple[Any, ...]]:
    keys = [getattr(LeaderboardEntry, name) for name in ROW_IDENTITY]
    statement = (
        select(*keys, LeaderboardEntry.result_id, MetricRow.value, MetricRow.low, MetricRow.high)
        .join(
            MetricRow, and_(MetricRow.result_id == LeaderboardEntry.result_id, MetricRow.name == query.metric)
        )
        .where(*_filters(query))
    )
    if place is not None:
        statement = statement.where(_follows(place, better))
    order = _order(MetricRow.low, MetricRow.value, LeaderboardEntry.result_id, better)
    return statement.order_by(*order).limit(query.limit + 1)


def _order(
    low: SQLColumnExpression[float | None],
    value: SQLColumnExpression[float],
    result_id: SQLColumnExpression[str],
    better: Better,
) -> tuple[SQLColumnExpression[Any], ...]:
    return low.is_(None), value.desc() if better is Better.HIGHER else value, result_id


def _follows(place: _Place, better: Better) -> ColumnElement[bool]:
    """The row comes after that place in the order."""
    worse = MetricRow.value < place.value if better is Better.HIGHER else MetricRow.value > place.value
    tied = and_(MetricRow.value == place.value, LeaderboardEntry.result_id > place.result_id)
    unsure = MetricRow.low.is_(None)
    if place.low is None:
        return and_(unsure, or_(worse, tied))
    return or_(unsure, worse, tied)


def _filters(query: LeaderboardQuery) -> Iterable[ColumnElement[bool]]:
    yield LeaderboardEntry.source == query.source
    if query.workload is not None:
        by_digest = len(query.workload) == DIGEST_LENGTH
        yield (LeaderboardEntry.workload_digest if by_digest else LeaderboardEntry.workload) == query.workload
    if query.model is not None:
        yield LeaderboardEntry.model == query.model
    if query.hardware is not None:
        yield func.lower(LeaderboardEntry.hardware_class).contains(query.hardware.lower(), autoescape=True)
    if query.technique is not None:
        yield LeaderboardEntry.techniques.contains(f"|{query.technique.lower()}|", autoescape=True)
    if query.backend is not None:
        yield LeaderboardEntry.backend == query.backend
    if query.min_top1 is not None:
        yield _measured("top1_agreement", query.min_top1, math.inf)
    if query.max_kld is not None:
        yield _measured("kld_mean", -math.inf, query.max_kld)


def _measured(metric: str, low: float, high: float) -> ColumnElement[bool]:
    """The entry's result has this metric, within these bounds."""
    figure = aliased(MetricRow)
    return exists().where(
        figure.result_id == LeaderboardEntry.result_id,
        figure.name == metric,
        figure.value.between(low, high),
    )


def _is_pareto() -> ColumnElement[bool]:
    """No other row of the same workload, hardware, device and source is as fast and as small, and better in one."""
    other = aliased(LeaderboardEntry)
    here = LeaderboardEntry
    dominated = exists().where(
        other.workload_digest == here.workload_digest,
        other.hardware_class == here.hardware_class,
        other.device == here.device,
        other.source == here.source,
        other.score >= here.score,
        other.size_bytes <= here.size_bytes,
        or_(other.score > here.score, other.size_bytes < here.size_bytes),
    )
    return (~dominated).label("pareto")


def _places(rows: Iterable[_Row], place: _Place | None) -> list[_Place]:
    """The place of each row, given the place where the page before ended."""
    places = []
    for entry, value, low, high, _ in rows:
        position = place.position + 1 if place else 1
        if place is not None and place.has_rank_of(low, high):
            place = place._replace(value=value, result_id=entry.result_id, position=position)
        else:
            place = _Place(value, entry.result_id, position, rank=position, low=low, high=high)
        places.append(place)
    return places


def _view(metric: str, row: _Row, rank: int) -> LeaderboardRow:
    entry: LeaderboardEntry = row[0]
    known = entry.score is not None and entry.size_bytes is not None
    summary = entry.summary
    return LeaderboardRow(
        rank=rank,
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
        metric=metric,
        value=summary["metrics"][metric],
        weight_bytes=_value(summary["metrics"], "weight_bytes"),
        peak_bytes=_value(summary["metrics"], "peak_bytes"),
        top1_agreement=_value(summary["metrics"], "top1_agreement"),
        kld_mean=_value(summary["metrics"], "kld_mean"),
        j_per_token=_value(summary["metrics"], "j_per_token"),
        pareto=bool(row.pareto) if known else None,
        warnings=summary["warnings"],
    )


def _entry(result: Result) -> dict[str, Any]:
    variant = result.variant
    metrics = {name: summary.model_dump(mode="json") for name, summary in result.metrics.items()}
    names = [technique["name"] for technique in variant.stack]
    summary = {
        "job_id": result.job_id,
        "label": variant.label,
        "workload": variant.workload,
        "techniques": names,
        "warnings": list(result.verdict.warnings),
        "metrics": metrics,
    }
    return {
        "workload_digest": variant.workload_digest,
        "variant_digest": variant.variant_digest,
        "hardware_class": result.environment.hardware_class,
        "source": result.source,
        "result_id": result.id,
        "measured_at": result.created_at,
        "workload": variant.workload["kind"],
        "model": variant.model,
        "backend": variant.backend,
        "device": variant.device,
        "techniques": "|" + "".join(f"{name}|" for name in names),
        "score": _score(metrics, variant.primary_metric),
        "size_bytes": _value(metrics, "peak_bytes" if variant.device is DeviceKind.CUDA else "weight_bytes"),
        "summary": summary,
    }


def _score(metrics: dict[str, Any], primary: str) -> float | None:
    value = _value(metrics, primary)
    return -value if value is not None and METRICS[primary].better is Better.LOWER else value


def _value(metrics: dict[str, Any], name: str) -> float | None:
    value: float | None = metrics.get(name, {}).get("value")
    return value
