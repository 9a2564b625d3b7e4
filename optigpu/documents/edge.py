"""The answers of the edge leaderboard: devices that can be compared, and workers that ran the same network."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from optigpu.documents.devices import DeviceSource, InputSource, RunnerName
from optigpu.documents.facts import NetworkFacts
from optigpu.vocabulary import Better, DeviceKind, Frozen, Metric


class EdgeMetric(StrEnum):
    """What devices are ranked by."""

    LATENCY = "latency"
    FPS = "fps"
    ENERGY = "energy"
    FPS_PER_WATT = "fps_per_watt"
    COST = "cost"


EDGE_METRICS: dict[EdgeMetric, Metric] = {
    EdgeMetric.LATENCY: Metric("s", Better.LOWER, "the median time of an inference"),
    EdgeMetric.FPS: Metric("1/s", Better.HIGHER, "inferences per second, without the time between them"),
    EdgeMetric.ENERGY: Metric("J", Better.LOWER, "energy of an inference, idle power included"),
    EdgeMetric.FPS_PER_WATT: Metric(
        "1/J", Better.HIGHER, "inferences per second and watt, which are inferences per joule"
    ),
    EdgeMetric.COST: Metric(
        "USD", Better.LOWER, "the device's price over its lifetime's inferences, and the price of the energy"
    ),
}
"""Every metric of devices with its unit and direction."""


class EdgeFigure(Frozen):
    """One figure of a device, in the unit of EDGE_METRICS. `low` to `high` reaches from the run's best window to the
    one that nine tenths of them are not worse than, and contains the value. A null value has its `reason`."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


class EdgeRow(Frozen):
    """A device on a board. Rows whose spreads overlap with the first of their rank share it. `rank` is null for a
    device that does not rank (`reasons`), and where the metric has no value (the figure's reason). `windows` and
    `inferences` are those of the report. `power_source` is what measured the energy ("none": nothing did)."""

    rank: int | None
    device_id: str
    device: str | None
    board: str
    source: DeviceSource
    report_id: str
    received_at: datetime
    firmware_sha256: str
    runner_version: str
    clock_hz: int
    windows: int
    inferences: int
    power_source: str
    figures: dict[EdgeMetric, EdgeFigure]
    reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


class Likeness(StrEnum):
    """How like the board's model is what a worker ran. `file`: the very file. `network`: the same network with other
    weights. `body`: the same but for the number of classes, and so for the last layer."""

    FILE = "file"
    NETWORK = "network"
    BODY = "body"


class EdgeWorkerRow(Frozen):
    """A worker's current result for the same network, not ranked with the devices. `energy_per_inference_j` includes
    idle power, as a device's does; `energy_above_idle_j` is the result's `j_per_image`. `energy_source` read the energy
    of `energy_scope` alone, which may be less than the whole machine. Null energy has its `reason`."""

    result_id: str
    job_id: str | None
    hardware: str
    device: DeviceKind
    backend: str
    label: str
    model: str | None
    likeness: Likeness
    batch_size: int | None
    measured_at: datetime
    images_per_s: float | None
    latency_s: float | None
    power_w: float | None
    energy_per_inference_j: float | None
    energy_above_idle_j: float | None
    fps_per_watt: float | None
    energy_source: str | None
    energy_scope: str | None
    reason: str | None = None
    warnings: tuple[str, ...] = ()


class EdgeBoard(Frozen):
    """Devices that can be compared: one model's file, one source of inputs, one runner; best first. `network` is what
    the model's manifest says, null without one. `row_count` counts all rows; `next_cursor` leads to those that follow.
    `not_ranked` counts by reason the devices whose newest report does not rank. `workers` are sorted by energy per
    inference, those without it last. `note` says why a board has no rows."""

    model_sha256: str
    network: NetworkFacts | None
    input_source: InputSource
    runner: RunnerName
    metric: EdgeMetric
    unit: str
    better: Better
    rows: tuple[EdgeRow, ...]
    row_count: int
    not_ranked: dict[str, int] = Field(default_factory=dict)
    workers: tuple[EdgeWorkerRow, ...] = ()
    note: str | None = None
    next_cursor: str | None = None
    links: dict[str, str] = Field(default_factory=dict)


LIFETIME_YEARS = 3.0
"""How long a device is assumed to last, where nobody says it."""


class CostAssumptions(Frozen):
    """What the cost of an inference is computed from, in US dollars. The device's price is spread over `lifetime_years`
    of inference. `price` null takes the catalog's price of each board; `price_per_kwh` null leaves the energy out."""

    price: float | None = None
    price_per_kwh: float | None = None
    lifetime_years: float = LIFETIME_YEARS


class EdgePage(Frozen):
    """Boards, the one with the newest report first. `next_cursor` leads to the boards that follow, and is null on the
    last page; `note` says why there is no board."""

    boards: tuple[EdgeBoard, ...]
    cost: CostAssumptions = CostAssumptions()
    note: str | None = None
    next_cursor: str | None = None
