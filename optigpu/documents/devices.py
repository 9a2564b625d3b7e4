"""The reports of edge devices, what is made of them, and the answers of the edge leaderboard.

Every number of a report is an integer: us, uJ, uW, bytes, Hz. A report may wait for days in the device's queue, so its
`schema` only grows by optional fields. On the leaderboard stand devices that can be compared, and workers that ran the
same network.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints

from optigpu.documents.facts import NetworkFacts
from optigpu.vocabulary import Better, DeviceKind, Frozen, Metric

DEVICE_SCHEMA = 1
MOST_WINDOWS = 100
MOST_US = 2**53 - 1
"""Of any number here: what every JSON reader holds exactly."""

Amount = Annotated[int, Field(strict=True, ge=0, le=MOST_US)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MOST_US)]
Hex16 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Uuid = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")
]
Name = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,64}$")]
"""Printable ASCII."""
BoardName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]


class Sent(Frozen):
    """Base of what devices send. `schema` is a field's name there, which pydantic's own method has in Python."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_: int = Field(alias="schema", strict=True, ge=DEVICE_SCHEMA, le=DEVICE_SCHEMA)


class InputSource(StrEnum):
    """Where the inputs of a run came from."""

    FIXED = "fixed"
    CAMERA = "camera"
    FOLDER = "folder"
    V4L2 = "v4l2"


class RunnerName(StrEnum):
    """What ran the model: on the device, or on a host, whose figures are never a device's."""

    TFLM_NATIVE = "tflm-native"
    TFLM_SERIAL = "tflm-serial"
    TFLM_HOST = "tflm-host"
    LITERT_HOST = "litert-host"
    SIMULATOR = "simulator"

    @property
    def is_host(self) -> bool:
        """Whether it runs on a host."""
        return self.value.endswith("-host")


class DeviceSource(StrEnum):
    """What a device is, by its invitation: a device, or a simulated one, which ranks nowhere."""

    DEVICE = "device"
    SIMULATOR = "simulator"


class ReportState(StrEnum):
    """The state of a report. `conflict` is only ever answered: such a report is not stored."""

    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"
    CONFLICT = "conflict"


class Reason(StrEnum):
    """Why a report does not rank. Those that question its truth quarantine it."""

    GOLDEN_FAILED = "golden_failed"
    MODEL_UNKNOWN = "model_unknown"
    FASTER_THAN_ROOFLINE = "faster_than_roofline"
    LONGER_THAN_OBSERVED = "longer_than_observed"
    SHORTER_THAN_OBSERVED = "shorter_than_observed"
    INCONSISTENT = "inconsistent"
    RUN_UNKNOWN = "run_unknown"
    RUN_REUSED = "run_reused"
    UNWITNESSED = "unwitnessed"
    MODEL_NOT_RANKABLE = "model_not_rankable"
    BOARD_UNKNOWN = "board_unknown"
    FEW_WINDOWS = "few_windows"
    SIMULATOR = "simulator"
    HOST = "host"
    ERROR = "error"

    @property
    def quarantines(self) -> bool:
        """Whether it questions the report's truth."""
        return self in _QUARANTINING


_QUARANTINING = frozenset(
    {
        Reason.GOLDEN_FAILED,
        Reason.MODEL_UNKNOWN,
        Reason.FASTER_THAN_ROOFLINE,
        Reason.LONGER_THAN_OBSERVED,
        Reason.SHORTER_THAN_OBSERVED,
        Reason.INCONSISTENT,
        Reason.RUN_UNKNOWN,
        Reason.RUN_REUSED,
    }
)


class Flag(StrEnum):
    """What a reader of a report should know; a flag changes nothing of its rank."""

    CLOCK_UNSYNCHRONISED = "clock_unsynchronised"
    SLOWER_THAN_PUBLISHED = "slower_than_published"


class RunnerInfo(Frozen):
    """What ran the model."""

    name: RunnerName
    version: Name


class Window(Frozen):
    """Inferences one after the other: their count, the sum of their times, and the energy of the whole window."""

    count: Positive
    total_us: Positive
    energy_uj: Amount | None


class Latency(Frozen):
    """The latencies of all windows together. A percentile is null below its sample count (11, 64, 662 requests)."""

    count: Amount
    min: Amount | None
    p50: Amount | None
    p90: Amount | None
    p99: Amount | None


class PowerInfo(Frozen):
    """What measured the energy ("ina226", "none", ...), and the power before the first window, if it was read."""

    source: BoardName
    idle_uw: Amount | None


class GoldenCheck(Frozen):
    """SHA-256 of the run's id and the outputs for the golden inputs, in order; `count` is that of the inputs."""

    count: Positive
    digest: Hex64


class DeviceReport(Sent):
    """One run on a device, identified by (device, `boot_id`, `sequence`). `ticks_us` is the device's time from the
    answer that began the run to its end, `started_us` its clock at the beginning (0: not synchronised). `run_id` is
    null where the server did not see the start."""

    boot_id: Hex16
    sequence: Positive
    run_id: Uuid | None
    model_sha256: Hex64
    input_bytes: Positive
    input_source: InputSource
    runner: RunnerInfo
    board: BoardName
    clock_hz: Amount
    firmware_sha256: Hex64
    warmup: Amount
    windows: Annotated[tuple[Window, ...], Field(max_length=MOST_WINDOWS)]
    latency_us: Latency
    power: PowerInfo
    golden: GoldenCheck | None
    arena_bytes: Amount
    heap_free: Amount
    started_us: Amount
    ticks_us: Amount
    error: Text | None

    @property
    def count(self) -> int:
        """The inferences of all windows."""
        return sum(window.count for window in self.windows)

    @property
    def total_us(self) -> int:
        """The time of all windows."""
        return sum(window.total_us for window in self.windows)

    @property
    def energy_per_inference_uj(self) -> float | None:
        """Energy of the windows, idle power included, per inference; null unless each window has one."""
        energies = [window.energy_uj for window in self.windows if window.energy_uj is not None]
        if not energies or len(energies) < len(self.windows):
            return None
        return sum(energies) / self.count


class DeviceStatus(Frozen):
    """How the device is at the moment of a message. `dropped` counts reports that its full queue lost."""

    board: BoardName
    reset_reason: Name
    rssi: Annotated[int, Field(strict=True, ge=-256, le=256)] | None
    heap_free: Amount
    queue_depth: Amount
    dropped: Amount
    agent_version: Name
    uptime_us: Amount


class ReportAnswer(Frozen):
    """What became of one report. `duplicate` says that it was here before, and this is what was answered then.
    `report_id` is null for a conflict: other content has this boot and sequence."""

    boot_id: str
    sequence: int
    report_id: str | None
    state: ReportState
    ranked: bool
    reasons: tuple[Reason, ...] = ()
    flags: tuple[Flag, ...] = ()
    duplicate: bool = False


class DeviceView(Frozen):
    """A device as it last described itself. What it never said is null. `clock_synchronised` is that of its last
    message. `rotate` says that it was asked for a new key and has not used one yet."""

    id: str
    name: str | None
    board: str
    source: DeviceSource
    firmware_sha256: str
    key_version: int
    created_at: datetime
    last_seen_at: datetime | None = None
    revoked_at: datetime | None = None
    rotate: bool = False
    boot_id: str | None = None
    clock_synchronised: bool | None = None
    agent_version: str | None = None
    reset_reason: str | None = None
    rssi: int | None = None
    heap_free: int | None = None
    queue_depth: int | None = None
    dropped: int | None = None
    uptime_us: int | None = None
    links: dict[str, str] = Field(default_factory=dict)


class DevicePage(Frozen):
    """Devices, newest first. `next_cursor` is null on the last page."""

    devices: tuple[DeviceView, ...]
    next_cursor: str | None = None


class DeviceReportView(Frozen):
    """A stored report and what was made of it; `document` is the report as the device sent it."""

    id: str
    device_id: str
    received_at: datetime
    source: DeviceSource
    state: ReportState
    ranked: bool
    reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    latency_p50_us: int | None = None
    count: int
    energy_per_inference_uj: float | None = None
    document: dict[str, Any]


class DeviceReportPage(Frozen):
    """The reports of a device, newest first. `next_cursor` is null on the last page."""

    reports: tuple[DeviceReportView, ...]
    next_cursor: str | None = None


class EdgeModelView(Frozen):
    """A model whose reports can rank; `manifest` is the document that `optigpu convert` wrote."""

    sha256: str
    rankable: bool
    added_at: datetime
    manifest: dict[str, Any]


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
