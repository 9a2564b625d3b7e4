"""The edge leaderboard: boards of the devices that ran one model's file with inputs of one source in one runner, each
ranked by one metric. `device_reports` says which report of a device stands, `edge_figures` what it amounts to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field
from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import InputSource, RunnerName
from optigpu.documents.edge import (
    EDGE_METRICS,
    LIFETIME_YEARS,
    CostAssumptions,
    EdgeBoard,
    EdgeFigure,
    EdgeMetric,
    EdgePage,
    EdgeRow,
)
from optigpu.documents.facts import NetworkFacts
from optigpu.store.cursors import bad_cursor, decode_cursor, encode_cursor
from optigpu.store.edge_figures import Costs, figures_of
from optigpu.store.edge_workers import WorkersBeside
from optigpu.store.errors import CursorError
from optigpu.store.tables import Device, DeviceReportRow, EdgeModel, EdgeStanding
from optigpu.vocabulary import Better, Frozen


class EdgeQuery(Frozen):
    """What to list. None leaves a filter out. `model` is the beginning of a file's SHA-256, `prices` are the catalog's
    by board in US dollars, and `price` is taken in their place."""

    metric: EdgeMetric = EdgeMetric.LATENCY
    model: str | None = None
    board: str | None = None
    input: InputSource | None = None
    runner: RunnerName | None = None
    include_unranked: bool = False
    price: float | None = None
    price_per_kwh: float | None = None
    lifetime_years: float = LIFETIME_YEARS
    prices: dict[str, float] = Field(default_factory=dict)
    limit: int | None = None
    cursor: str | None = None

    @property
    def assumptions(self) -> CostAssumptions:
        """What costs are computed from."""
        return CostAssumptions(
            price=self.price, price_per_kwh=self.price_per_kwh, lifetime_years=self.lifetime_years
        )

    def costs(self, board: str) -> Costs:
        """What a device with that board costs."""
        price = self.prices.get(board) if self.price is None else self.price
        return Costs(price, self.price_per_kwh, self.lifetime_years)


def conditions(query: EdgeQuery) -> Iterable[ColumnElement[bool]]:
    """What a standing and its report have to be."""
    if query.model is not None:
        yield EdgeStanding.model_sha256.startswith(query.model.lower(), autoescape=True)
    if query.input is not None:
        yield EdgeStanding.input_source == query.input
    if query.runner is not None:
        yield EdgeStanding.runner == query.runner
    if query.board is not None:
        yield DeviceReportRow.board == query.board


def models(session: Session) -> list[str]:
    """The files of models that the service knows or has reports of, sorted."""
    known = session.scalars(select(EdgeModel.sha256)).all()
    return sorted({*known, *session.scalars(select(EdgeStanding.model_sha256).distinct())})


def boards(session: Session) -> list[str]:
    """The boards of standing reports, sorted."""
    standing = select(DeviceReportRow.board).join(EdgeStanding, EdgeStanding.report_id == DeviceReportRow.id)
    return sorted(set(session.scalars(standing.distinct())))


BOARDS = 20
"""How many boards a page has."""
ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""
REVOKED = "device_revoked"
"""Why a device whose key was revoked does not rank: nobody knows since when the key was not its own."""


class Partition(NamedTuple):
    """What devices of a board have in common."""

    model_sha256: str
    input_source: InputSource
    runner: RunnerName


class _Place(NamedTuple):
    """The place of a row in the order of its board: the lowest comes first."""

    group: int
    value: float
    key: str


@dataclass(frozen=True)
class _Candidate:
    """A device on a board, before it has its rank."""

    place: _Place
    row: EdgeRow

    @property
    def ranks(self) -> bool:
        return self.place.group == _RANKED


_RANKED, _WITHOUT_FIGURE, _UNRANKED = range(3)


def query(session: Session, query: EdgeQuery) -> EdgePage:
    """A page of boards, or of the rows of one. Raises CursorError."""
    at, after = _position(query.cursor)
    found = session.execute(_partitions(query, at, after)).all()
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    workers = WorkersBeside(session)
    boards = tuple(_board(session, query, Partition(*row[:3]), limit, at, workers) for row in found[:BOARDS])
    return EdgePage(
        boards=boards,
        cost=query.assumptions,
        note=None if boards else _why_none(session),
        next_cursor=encode_cursor(found[BOARDS - 1].newest) if len(found) > BOARDS else None,
    )


def continues_list(cursor: str | None) -> bool:
    """Whether a cursor continues a list of boards, and not the rows of one board. Raises CursorError."""
    return _position(cursor)[1] is not None


def _position(cursor: str | None) -> tuple[tuple[Partition, _Place] | None, str | None]:
    """What a cursor continues: the rows of a board after a place, or the boards after the one with a newest report."""
    if cursor is None:
        return None, None
    try:
        (newest,) = decode_cursor(cursor, str)
        return None, newest
    except CursorError:
        model, source, runner, *place = decode_cursor(cursor, str, str, str, int, (int, float), str)
    try:
        return (Partition(model, InputSource(source), RunnerName(runner)), _Place(*place)), None
    except ValueError:
        raise bad_cursor() from None


def _partitions(
    query: EdgeQuery, at: tuple[Partition, _Place] | None, after: str | None
) -> Select[str, InputSource, RunnerName, str]:
    """Partitions with a standing report, the one with the newest first: ids begin with their time."""
    newest = func.max(EdgeStanding.report_id).label("newest")
    columns = (EdgeStanding.model_sha256, EdgeStanding.input_source, EdgeStanding.runner)
    statement = (
        select(*columns, newest)
        .join(DeviceReportRow, DeviceReportRow.id == EdgeStanding.report_id)
        .where(*conditions(query))
        .group_by(*columns)
    )
    if at is not None:
        statement = statement.where(*_within(at[0]))
    if after is not None:
        statement = statement.having(newest < after)
    return statement.order_by(newest.desc()).limit(BOARDS + 1)


def _within(partition: Partition) -> tuple[ColumnElement[bool], ...]:
    return (
        EdgeStanding.model_sha256 == partition.model_sha256,
        EdgeStanding.input_source == partition.input_source,
        EdgeStanding.runner == partition.runner,
    )


def _board(
    session: Session,
    query: EdgeQuery,
    partition: Partition,
    limit: int,
    at: tuple[Partition, _Place] | None,
    workers: WorkersBeside,
) -> EdgeBoard:
    every = sorted(_candidates(session, query, partition), key=lambda each: each.place)
    unranked = [each.row for each in every if each.place.group == _UNRANKED]
    listed = [each for each in every if query.include_unranked or each.place.group != _UNRANKED]
    rows = [each for each in _with_ranks(listed, query.metric) if at is None or each.place > at[1]]
    network = _network(session, partition.model_sha256)
    return EdgeBoard(
        **partition._asdict(),
        network=network,
        metric=query.metric,
        unit=EDGE_METRICS[query.metric].unit,
        better=EDGE_METRICS[query.metric].better,
        rows=tuple(each.row for each in rows[:limit]),
        row_count=len(listed),
        not_ranked=_counts(unranked),
        workers=workers.of(partition.model_sha256, network),
        note=None if listed else _why_empty(unranked),
        next_cursor=encode_cursor(*partition, *rows[limit - 1].place) if len(rows) > limit else None,
    )


def _candidates(session: Session, query: EdgeQuery, partition: Partition) -> Iterable[_Candidate]:
    """The standing reports of a partition: of each device the one that ranks, and the newest that does not."""
    statement = (
        select(EdgeStanding.ranked, DeviceReportRow, Device)
        .join(DeviceReportRow, DeviceReportRow.id == EdgeStanding.report_id)
        .join(Device, Device.id == EdgeStanding.device_id)
        .where(*_within(partition), *conditions(query))
    )
    for ranked, report, device in session.execute(statement):
        row = _row(query, report, device)
        figure = row.figures[query.metric]
        group = _WITHOUT_FIGURE if figure.value is None else _RANKED
        if not ranked or device.revoked_at is not None:
            group = _UNRANKED
            row = row.model_copy(update={"reasons": _reasons(report, device)})
        yield _Candidate(_Place(group, _order(query.metric, figure), _key(row)), row)


def _order(metric: EdgeMetric, figure: EdgeFigure) -> float:
    value = figure.value or 0.0
    return -value if EDGE_METRICS[metric].better is Better.HIGHER else value


def _key(row: EdgeRow) -> str:
    """Tells rows with equal values apart: a device may have two on a board, one of which does not rank."""
    return f"{row.device_id}/{row.report_id}"


def _reasons(report: DeviceReportRow, device: Device) -> tuple[str, ...]:
    revoked = (REVOKED,) if device.revoked_at is not None else ()
    return (*report.reasons, *revoked)


def _row(query: EdgeQuery, report: DeviceReportRow, device: Device) -> EdgeRow:
    document = report.document
    return EdgeRow(
        rank=None,
        device_id=device.id,
        device=device.name,
        board=report.board,
        source=report.source,
        report_id=report.id,
        received_at=report.received_at,
        firmware_sha256=document["firmware_sha256"],
        runner_version=document["runner"]["version"],
        clock_hz=document["clock_hz"],
        windows=len(document["windows"]),
        inferences=report.count,
        power_source=report.power_source,
        figures=figures_of(document, report.board, query.costs(report.board)),
        flags=tuple(report.flags),
    )


def _with_ranks(listed: Sequence[_Candidate], metric: EdgeMetric) -> Iterable[_Candidate]:
    """A row shares the rank of the one before it if its spread touches that of the first row of that rank; else its
    rank is its position (1, 1, 3). Rows are compared with the first alone, so that a chain of overlaps ends."""
    rank, first = 0, EdgeFigure(value=None)
    for position, each in enumerate(listed, start=1):
        if not each.ranks:
            yield each
            continue
        figure = each.row.figures[metric]
        if rank == 0 or not _overlap(first, figure):
            rank, first = position, figure
        yield _Candidate(each.place, each.row.model_copy(update={"rank": rank}))


def _overlap(one: EdgeFigure, other: EdgeFigure) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high


def _network(session: Session, model_sha256: str) -> NetworkFacts | None:
    model = session.get(EdgeModel, model_sha256)
    return NetworkFacts.of_manifest(model.document) if model else None


def _counts(rows: Sequence[EdgeRow]) -> dict[str, int]:
    """How many rows have each reason, the most frequent first."""
    counts: dict[str, int] = {}
    for row in rows:
        for reason in row.reasons:
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _why_empty(unranked: Sequence[EdgeRow]) -> str:
    are = "report is" if len(unranked) == 1 else "reports are"
    named = ", ".join(f"{reason} ({count})" for reason, count in _counts(unranked).items())
    return f"{len(unranked)} {are} not ranked: {named}. Show them with include_unranked=true."


def _why_none(session: Session) -> str:
    if session.scalars(select(EdgeStanding.report_id).limit(1)).first() is None:
        return "No device has reported yet. Enrol one with `python -m api devices invite`."
    return "No report matches all of these filters; leave one out."
