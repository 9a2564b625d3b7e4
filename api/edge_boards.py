"""The edge leaderboard: boards of the devices that ran one model's file with inputs of one source in one runner, each
ranked by one metric. A figure has its spread over the run's windows, or the reason why there is none.
`store/edge_reports.py` has the reports that stand."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from optigpu.documents.devices import (
    EDGE_METRICS,
    CostAssumptions,
    EdgeBoard,
    EdgeFigure,
    EdgeMetric,
    EdgePage,
    EdgeRow,
    EdgeWorkerRow,
    InputSource,
    Likeness,
    RunnerName,
)
from optigpu.documents.facts import NetworkFacts
from optigpu.store import edge_reports
from optigpu.store.database import Session
from optigpu.store.edge_reports import EdgeFilters, ImageResult, Partition
from optigpu.store.entries import COMPARED_WITH_DEVICES, RATES
from optigpu.store.statements import bad_cursor, decode_cursor, encode_cursor, newest_of
from optigpu.vocabulary import Better, Document

SECONDS_PER_YEAR = 365.25 * 86400
JOULES_PER_KWH = 3.6e6
SPREAD_SHARE = 0.9
"""The share of windows that a spread covers, from the best one on: a single disturbed window of ten is left out."""
NO_SENSOR, SIMULATED = "none", "simulated"
"""Power sources that measured nothing."""


@dataclass(frozen=True)
class _Run:
    """Inferences one after the other: a window, or all windows together. `energy_j` is null where none was measured."""

    count: int
    seconds: float
    energy_j: float | None


def figures_of(report: Document, board: str, costs: CostAssumptions) -> dict[EdgeMetric, EdgeFigure]:
    """Every metric of a report, which is read as it was stored."""
    missing = _why_no_energy(report)
    windows = [
        _Run(
            count=window["count"],
            seconds=window["total_us"] / 1e6,
            energy_j=None if missing else window["energy_uj"] / 1e6,
        )
        for window in report["windows"]
    ]
    if not windows:
        return dict.fromkeys(EdgeMetric, EdgeFigure(value=None, reason="The run had no window."))
    reasons = _reasons(missing, board, costs)
    latency, whole = report["latency_us"], _sum(windows)
    if latency["p50"] is None:
        few = f"{latency['count']} inferences are too few for a median."
        reasons[EdgeMetric.LATENCY] = few
    found = {}
    for metric in EdgeMetric:
        if metric in reasons:
            found[metric] = EdgeFigure(value=None, reason=reasons[metric])
            continue
        is_latency = metric is EdgeMetric.LATENCY  # the median that the device computed
        value = latency["p50"] / 1e6 if is_latency else _value(metric, whole, costs)
        best_first = sorted(
            (_value(metric, window, costs) for window in windows),
            reverse=EDGE_METRICS[metric].better is Better.HIGHER,
        )
        covered = best_first[: math.ceil(SPREAD_SHARE * len(best_first))]
        found[metric] = EdgeFigure(value=value, low=min(*covered, value), high=max(*covered, value))
    return found


def _reasons(missing: str | None, board: str, costs: CostAssumptions) -> dict[EdgeMetric, str]:
    """Why metrics have no value."""
    found = dict.fromkeys((EdgeMetric.ENERGY, EdgeMetric.FPS_PER_WATT), missing) if missing else {}
    if costs.price is None:
        return found | {EdgeMetric.COST: f"The price of {board} is not known; give one with price=."}
    if costs.price_per_kwh is not None and missing:
        found[EdgeMetric.COST] = f"{missing} Leave price_per_kwh out for the cost without the energy."
    return found


def _value(metric: EdgeMetric, run: _Run, costs: CostAssumptions) -> float:
    """The metric of inferences; the energy is known if the metric needs it."""
    fps, energy = run.count / run.seconds, (run.energy_j or 0.0) / run.count
    match metric:
        case EdgeMetric.LATENCY:
            return run.seconds / run.count
        case EdgeMetric.FPS:
            return fps
        case EdgeMetric.ENERGY:
            return energy
        case EdgeMetric.FPS_PER_WATT:
            return 1 / energy
        case EdgeMetric.COST:
            device = (costs.price or 0.0) / (costs.lifetime_years * SECONDS_PER_YEAR * fps)
            return device + (costs.price_per_kwh or 0.0) * energy / JOULES_PER_KWH


def _why_no_energy(report: Document) -> str | None:
    """Why a report has no energy, or None. A sensor that read nothing at all in a window did not work."""
    source = report["power"]["source"]
    if source == NO_SENSOR:
        return "The device has no power sensor."
    if source == SIMULATED:
        return "The device's power was simulated."
    if all(window["energy_uj"] for window in report["windows"]):
        return None
    return f"The power sensor {source} gave no energy for at least one window."


def _sum(windows: Sequence[_Run]) -> _Run:
    energies = [window.energy_j for window in windows if window.energy_j is not None]
    return _Run(
        sum(window.count for window in windows),
        math.fsum(window.seconds for window in windows),
        math.fsum(energies) if len(energies) == len(windows) else None,
    )


class EdgeQuery(CostAssumptions, EdgeFilters):
    """What to list. `prices` are the catalog's by board in US dollars, and `price` is taken in their place."""

    metric: EdgeMetric = EdgeMetric.LATENCY
    include_unranked: bool = False
    prices: dict[str, float] = Field(default_factory=dict)
    limit: int | None = None
    cursor: str | None = None

    def costs(self, board: str) -> CostAssumptions:
        """Those of a device with that board."""
        price = self.prices.get(board) if self.price is None else self.price
        return self.model_copy(update={"price": price})


NOT_MEASURED = "Its energy was not measured."
BOARDS = 20
"""How many boards a page has."""
ROWS = 50
HEAD_ROWS = 5
"""How many rows a board shows where it is the only one, and where there are several."""
REVOKED = "device_revoked"
"""Why a device whose key was revoked does not rank: nobody knows since when the key was not its own."""


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
    found = edge_reports.partitions(session, query, only=at[0] if at else None, after=after, limit=BOARDS + 1)
    alone = len(found) == 1 and after is None
    limit = query.limit or (ROWS if alone else HEAD_ROWS)
    images = edge_reports.image_results(session) if found else []
    boards = tuple(_board(session, query, each, limit, at, images) for each, _ in found[:BOARDS])
    note = None
    if not boards:
        note = "No report matches all of these filters; leave one out."
        if not edge_reports.partitions(session, EdgeQuery(), limit=1):
            note = "No device has reported yet. Enrol one with `python -m api devices invite`."
    return EdgePage(
        boards=boards,
        cost=CostAssumptions(**query.model_dump(include=set(CostAssumptions.model_fields))),
        note=note,
        next_cursor=encode_cursor(found[BOARDS - 1][1]) if len(found) > BOARDS else None,
    )


def _place_of(cursor: str) -> tuple[Partition, _Place]:
    """The board and the place in it that a cursor continues from. Raises CursorError."""
    model, source, runner, *place = decode_cursor(cursor, str, str, str, int, (int, float), str)
    try:
        return Partition(model, InputSource(source), RunnerName(runner)), _Place(*place)
    except ValueError:
        raise bad_cursor() from None


def _board(
    session: Session,
    query: EdgeQuery,
    partition: Partition,
    limit: int,
    at: tuple[Partition, _Place] | None,
    images: Sequence[ImageResult],
) -> EdgeBoard:
    every = sorted(_candidates(session, query, partition), key=lambda each: each.place)
    unranked = [each.row for each in every if each.place.group == _UNRANKED]
    listed = [each for each in every if query.include_unranked or each.place.group != _UNRANKED]
    rows = [each for each in _with_ranks(listed, query.metric) if at is None or each.place > at[1]]
    manifest = edge_reports.document_of(session, partition.model_sha256)
    network = NetworkFacts.of_manifest(manifest) if manifest else None
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
    for report, device, is_revoked in edge_reports.standing(session, query, partition):
        document = report.document
        row = EdgeRow(
            **report.model_dump(include={"device_id", "source", "received_at", "flags"}),
            rank=None,
            device=device,
            board=document["board"],
            report_id=report.id,
            firmware_sha256=document["firmware_sha256"],
            runner_version=document["runner"]["version"],
            clock_hz=document["clock_hz"],
            windows=len(document["windows"]),
            inferences=report.count,
            power_source=document["power"]["source"],
            figures=figures_of(document, document["board"], query.costs(document["board"])),
        )
        figure = row.figures[query.metric]
        group = _WITHOUT_FIGURE if figure.value is None else _RANKED
        if not report.ranked or is_revoked:
            group = _UNRANKED
            revoked = (REVOKED,) if is_revoked else ()
            row = row.model_copy(update={"reasons": (*report.reasons, *revoked)})
        sign = -1 if EDGE_METRICS[query.metric].better is Better.HIGHER else 1
        # A device may have two rows on a board, one of which does not rank.
        yield _Candidate(_Place(group, sign * (figure.value or 0.0), f"{report.device_id}/{report.id}"), row)


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


def _workers(
    images: Sequence[ImageResult], model_sha256: str, network: NetworkFacts | None
) -> tuple[EdgeWorkerRow, ...]:
    """The results of a model's file or network, by energy per inference; those without it last, fastest first."""
    likenesses = [(each, _likeness(each.edge, model_sha256, network)) for each in images]
    found = [_worker_row(each, likeness) for each, likeness in likenesses if likeness]
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


def _worker_row(image: ImageResult, likeness: Likeness) -> EdgeWorkerRow:
    """The energy of an image is the power while requests run, idle included, over the rate at which they run."""
    shown, edge = image
    metrics: Mapping[str, Document] = edge["metrics"]
    known = {name: (metrics.get(name) or {}).get("value") for name in COMPARED_WITH_DEVICES}
    rate, power = known["images_per_s"], known["power_w"]
    energy = power / rate if power and rate else None
    sensor = edge.get("energy") or {}
    same = {
        "result_id",
        "job_id",
        "hardware",
        "device",
        "backend",
        "label",
        "model",
        "measured_at",
        "warnings",
    }
    return EdgeWorkerRow(
        **shown.model_dump(include=same),
        **{name: known[name] for name in RATES},
        likeness=likeness,
        batch_size=shown.workload.get("batch_size"),
        energy_per_inference_j=energy,
        energy_above_idle_j=known["j_per_image"],
        fps_per_watt=1 / energy if energy else None,
        energy_source=sensor.get("source"),
        energy_scope=sensor.get("scope"),
        reason=None if energy else (metrics.get("power_w") or {}).get("reason") or NOT_MEASURED,
    )
