"""The edge leaderboard: boards of the devices that ran one model's file with inputs of one source in one runner, each
ranked by one metric. `device_reports` says which report of a device stands, `edge_figures` what it amounts to."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import Field
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import InputSource, RunnerName
from optigpu.documents.edge import (
    EDGE_METRICS,
    CostAssumptions,
    EdgeBoard,
    EdgeMetric,
    EdgePage,
    EdgeRow,
    EdgeWorkerRow,
    Likeness,
)
from optigpu.documents.facts import NetworkFacts, RunFacts
from optigpu.documents.result import Result
from optigpu.documents.views import RowFacts, Standing
from optigpu.store.edge_figures import figures_of
from optigpu.store.statements import bad_cursor, decode_cursor, encode_cursor, newest_of
from optigpu.store.tables import Device, DeviceReportRow, EdgeModel, EdgeStanding, LeaderboardEntry
from optigpu.vocabulary import Better, Document


class EdgeQuery(CostAssumptions):
    """What to list. None leaves a filter out. `model` is the beginning of a file's SHA-256, `prices` are the catalog's
    by board in US dollars, and `price` is taken in their place."""

    metric: EdgeMetric = EdgeMetric.LATENCY
    model: str | None = None
    board: str | None = None
    input: InputSource | None = None
    runner: RunnerName | None = None
    include_unranked: bool = False
    prices: dict[str, float] = Field(default_factory=dict)
    limit: int | None = None
    cursor: str | None = None

    def costs(self, board: str) -> CostAssumptions:
        """Those of a device with that board."""
        price = self.prices.get(board) if self.price is None else self.price
        return self.model_copy(update={"price": price})


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


IMAGES = "classify"
"""The workload that devices run."""
MOST_RESULTS = 2000
"""The newest of the current results of that workload that are looked at."""
NOT_MEASURED = "Its energy was not measured."
RATES = ("images_per_s", "latency_s", "power_w")
COMPARED = (*RATES, "j_per_image")
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


class _Candidate(NamedTuple):
    """A device on a board, before it has its rank."""

    place: _Place
    row: EdgeRow


_RANKED, _WITHOUT_FIGURE, _UNRANKED = range(3)


def query(session: Session, query: EdgeQuery) -> EdgePage:
    """A page of boards, or of the rows of one. Raises CursorError."""
    after = newest_of(query.cursor)
    at = _place_of(query.cursor) if query.cursor is not None and after is None else None
    # Partitions with a standing report, the one with the newest first: ids begin with their time.
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
    found = session.execute(statement.order_by(newest.desc()).limit(BOARDS + 1)).all()
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    images = _image_results(session) if found else ()
    boards = tuple(_board(session, query, Partition(*row[:3]), limit, at, images) for row in found[:BOARDS])
    note = None
    if not boards:
        note = "No report matches all of these filters; leave one out."
        if session.scalars(select(EdgeStanding.report_id).limit(1)).first() is None:
            note = "No device has reported yet. Enrol one with `python -m api devices invite`."
    return EdgePage(
        boards=boards,
        cost=CostAssumptions(**query.model_dump(include=set(CostAssumptions.model_fields))),
        note=note,
        next_cursor=encode_cursor(found[BOARDS - 1].newest) if len(found) > BOARDS else None,
    )


def _place_of(cursor: str) -> tuple[Partition, _Place]:
    """The board and the place in it that a cursor continues from. Raises CursorError."""
    model, source, runner, *place = decode_cursor(cursor, str, str, str, int, (int, float), str)
    try:
        return Partition(model, InputSource(source), RunnerName(runner)), _Place(*place)
    except ValueError:
        raise bad_cursor() from None


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
    images: Sequence[LeaderboardEntry],
) -> EdgeBoard:
    every = sorted(_candidates(session, query, partition), key=lambda each: each.place)
    unranked = [each.row for each in every if each.place.group == _UNRANKED]
    listed = [each for each in every if query.include_unranked or each.place.group != _UNRANKED]
    rows = [each for each in _with_ranks(listed, query.metric) if at is None or each.place > at[1]]
    model = session.get(EdgeModel, partition.model_sha256)
    network = NetworkFacts.of_manifest(model.document) if model else None
    counts = Counter(reason for row in unranked for reason in row.reasons)
    not_ranked = dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))
    note = None
    if not listed:
        are = "report is" if len(unranked) == 1 else "reports are"
        named = ", ".join(f"{reason} ({count})" for reason, count in not_ranked.items())
        note = f"{len(unranked)} {are} not ranked: {named}. Show them with include_unranked=true."
    return EdgeBoard(
        **partition._asdict(),
        network=network,
        metric=query.metric,
        unit=EDGE_METRICS[query.metric].unit,
        better=EDGE_METRICS[query.metric].better,
        rows=tuple(each.row for each in rows[:limit]),
        row_count=len(listed),
        not_ranked=not_ranked,
        workers=_workers(images, partition.model_sha256, network),
        note=note,
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
        document = report.document
        row = report.as_view(
            EdgeRow,
            rank=None,
            device=device.name,
            report_id=report.id,
            firmware_sha256=document["firmware_sha256"],
            runner_version=document["runner"]["version"],
            clock_hz=document["clock_hz"],
            windows=len(document["windows"]),
            inferences=report.count,
            figures=figures_of(document, report.board, query.costs(report.board)),
            reasons=(),
        )
        figure = row.figures[query.metric]
        group = _WITHOUT_FIGURE if figure.value is None else _RANKED
        if not ranked or device.revoked_at is not None:
            group = _UNRANKED
            revoked = (REVOKED,) if device.revoked_at is not None else ()
            row = row.model_copy(update={"reasons": (*report.reasons, *revoked)})
        sign = -1 if EDGE_METRICS[query.metric].better is Better.HIGHER else 1
        # A device may have two rows on a board, one of which does not rank.
        yield _Candidate(_Place(group, sign * (figure.value or 0.0), f"{device.id}/{report.id}"), row)


def _with_ranks(listed: Sequence[_Candidate], metric: EdgeMetric) -> Iterable[_Candidate]:
    """A row shares the rank of the one before it if its spread touches that of the first row of that rank; else its
    rank is its position (1, 1, 3). Rows are compared with the first alone, so that a chain of overlaps ends."""
    rank, first = 0, (0.0, 0.0)
    for position, each in enumerate(listed, start=1):
        if each.place.group != _RANKED:
            yield each
            continue
        figure = each.row.figures[metric]
        low, high = figure.low or 0.0, figure.high or 0.0  # of what ranks, both are known
        if rank == 0 or first[0] > high or low > first[1]:
            rank, first = position, (low, high)
        yield _Candidate(each.place, each.row.model_copy(update={"rank": rank}))


def _image_results(session: Session) -> Sequence[LeaderboardEntry]:
    """The newest current results of image classifiers that workers measured."""
    query = select(LeaderboardEntry).where(
        LeaderboardEntry.workload == IMAGES,
        LeaderboardEntry.standing == Standing.CURRENT,
        LeaderboardEntry.source == "worker",
    )
    return session.scalars(query.order_by(LeaderboardEntry.result_id.desc()).limit(MOST_RESULTS)).all()


def comparison_of(result: Result) -> Document | None:
    """What a row of a worker's result is made of, as its entry keeps it; None for what does not classify images."""
    facts: RunFacts = result.facts
    if facts.network is None:
        return None
    metrics = {name: result.metrics[name] for name in COMPARED if name in result.metrics}
    return {
        "network": facts.network.model_dump(mode="json"),
        "weight_hash": facts.weights.hash if facts.weights else None,
        "energy": {"source": facts.energy.source, "scope": facts.energy.scope} if facts.energy else None,
        "metrics": {name: metric.model_dump(mode="json") for name, metric in metrics.items()},
    }


def _workers(
    entries: Sequence[LeaderboardEntry], model_sha256: str, network: NetworkFacts | None
) -> tuple[EdgeWorkerRow, ...]:
    """The results of a model's file or network, by energy per inference; those without it last, fastest first."""
    likenesses = [(entry, _likeness(entry.edge or {}, model_sha256, network)) for entry in entries]
    found = [_worker_row(entry, likeness) for entry, likeness in likenesses if likeness]
    found.sort(
        key=lambda row: (row.energy_per_inference_j or math.inf, -(row.images_per_s or 0.0), row.result_id)
    )
    return tuple(found)


def _likeness(edge: Document, model_sha256: str, network: NetworkFacts | None) -> Likeness | None:
    """How like a model a result's is; None for another network, and for a result that does not say which it ran."""
    if edge.get("weight_hash") == model_sha256:
        return Likeness.FILE
    ran = edge.get("network")
    if ran is None or network is None:
        return None
    found = NetworkFacts.model_validate(ran)
    if not found.has_body_of(network):
        return None
    return Likeness.NETWORK if found.classes == network.classes else Likeness.BODY


def _worker_row(entry: LeaderboardEntry, likeness: Likeness) -> EdgeWorkerRow:
    """The energy of an image is the power while requests run, idle included, over the rate at which they run."""
    shown, edge = RowFacts.model_validate(entry.shown), entry.edge or {}
    metrics: Mapping[str, Document] = edge["metrics"]
    known = {name: (metrics.get(name) or {}).get("value") for name in COMPARED}
    rate, power = known["images_per_s"], known["power_w"]
    energy = power / rate if power and rate else None
    sensor = edge.get("energy") or {}
    return entry.as_view(
        EdgeWorkerRow,
        **{name: known[name] for name in RATES},
        job_id=shown.job_id,
        hardware=entry.hardware_class,
        label=shown.label,
        likeness=likeness,
        batch_size=shown.workload.get("batch_size"),
        energy_per_inference_j=energy,
        energy_above_idle_j=known["j_per_image"],
        fps_per_watt=1 / energy if energy else None,
        energy_source=sensor.get("source"),
        energy_scope=sensor.get("scope"),
        reason=None if energy else (metrics.get("power_w") or {}).get("reason") or NOT_MEASURED,
        warnings=tuple(entry.warnings.split()),
    )
