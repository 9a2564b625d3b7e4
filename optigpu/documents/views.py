"""The answers of the service: the store makes them, the API sends them, the client reads them."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from optigpu.documents.others import OthersView
from optigpu.documents.result import MetricSummary
from optigpu.documents.selftest import SelfTestSummary
from optigpu.vocabulary import (
    Better,
    DeviceKind,
    FailureKind,
    Frozen,
    JobState,
    Role,
    Scheduler,
    VariantStatus,
)


class ReusedView(Frozen):
    """Where a result comes from that was there before its job was posted. `age_s` is how old it was then."""

    job_id: str | None
    measured_at: datetime
    age_s: float


class VariantView(Frozen):
    """The state of one variant of a job. `reused` is null where this job itself measured its result."""

    index: int
    role: Role
    label: str
    status: VariantStatus
    reason: str | None = None
    result_id: str | None = None
    reused: ReusedView | None = None


class AttemptView(Frozen):
    """One time that a worker took the job. `outcome` is null while it runs."""

    number: int
    worker_id: str
    started_at: datetime
    ended_at: datetime | None = None
    outcome: str | None = None


class LaunchState(StrEnum):
    """submitted: handed to the scheduler, which has not confirmed it; pending: it waits there; running; ended."""

    SUBMITTED = "submitted"
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


class LaunchView(Frozen):
    """The last time that a job was handed to a scheduler. `reference` is the scheduler's own id of it; `reason` why it
    ended."""

    scheduler: Scheduler
    state: LaunchState
    reference: str | None = None
    reason: str | None = None
    created_at: datetime
    ended_at: datetime | None = None


class ProgressView(Frozen):
    """How far a job is; 1 once it has ended, however. `remaining_s` is a prediction, null until it is known."""

    fraction: float = 0.0
    doing: str | None = None
    remaining_s: float | None = None


class JobSummary(Frozen):
    """A job in a list. A `parked` one failed for a reason that does not lie in what it asks for; it can be put back."""

    id: str
    state: JobState
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    reason: str | None = None
    workload: str
    model: str | None
    plan: str
    device: DeviceKind
    name: str | None = None
    tags: tuple[str, ...] = ()
    priority: int = 0
    parked: bool = False
    links: dict[str, str] = Field(default_factory=dict)


class Want(StrEnum):
    """What a job asks for of a worker, in the order of ruling out; `launcher` hands the job to a scheduler."""

    WORKER = "worker"
    LAUNCHER = "launcher"
    DEVICE = "device"
    GPU = "gpu"
    MEMORY = "memory"
    BACKEND = "backend"
    PACKAGE = "package"
    MODEL = "model"


class Unserved(Frozen):
    """Why no live worker can take a queued job: what none of them has, and a sentence for people. `name` is what was
    asked for: a device, part of a GPU's name, bytes, a backend, a package, or a model's reference."""

    want: Want
    name: str | None
    sentence: str


class JobView(JobSummary):
    """A job, whole. `queue_position` is 1 for the next in line, `estimated_start_at` comes from how long jobs like it
    took; both are null once it runs, for a scheduler, and in the answer to a POST. `not_before` is until when it waits
    to be tried again; `failure` is what its last attempt failed of. `unserved` is null when a live worker can take it.
    `launch` says what became of it at its scheduler. `spec` and `attribution` are the documents as they were stored."""

    queue_position: int | None = None
    estimated_start_at: datetime | None = None
    not_before: datetime | None = None
    failure: FailureKind | None = None
    unserved: Unserved | None = None
    launch: LaunchView | None = None
    progress: ProgressView = ProgressView()
    attempts: tuple[AttemptView, ...] = ()
    variants: tuple[VariantView, ...] = ()
    spec: dict[str, Any]
    schema_version: int
    attribution: dict[str, Any] | None = None


class JobPage(Frozen):
    """Jobs, newest first. `next_cursor` is null on the last page."""

    jobs: tuple[JobSummary, ...]
    next_cursor: str | None = None


class EventView(Frozen):
    """One event of a job. `sequence` grows from 1; newer progress replaces older, which leaves gaps."""

    sequence: int
    at: datetime
    kind: str
    data: dict[str, Any]


class Standing(StrEnum):
    """What a result is at its place on a board: the current one, an earlier one, or invalid. Only current ones rank."""

    CURRENT = "current"
    EARLIER = "earlier"
    INVALID = "invalid"


class RowFacts(Frozen):
    """What a row of a board shows of its result that stays as it is: one variant on one class of hardware. `reasons`
    and `notes` say why a result is invalid. Quality and energy are null where they were not measured."""

    result_id: str
    job_id: str | None
    source: str
    measured_at: datetime
    workload: dict[str, Any]
    workload_digest: str
    variant_digest: str
    model: str | None
    label: str
    techniques: tuple[str, ...]
    backend: str
    device: DeviceKind
    hardware: str
    versions: dict[str, str] = Field(default_factory=dict)
    weight_bytes: float | None = None
    peak_bytes: float | None = None
    top1_agreement: float | None = None
    kld_mean: float | None = None
    j_per_token: float | None = None
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class LeaderboardRow(RowFacts):
    """A result on a board, ranked by one metric. Rows whose intervals overlap with the first of their rank share it;
    those without one share the last; `rank` is null for what is not current. `superseded`: the variant was since
    measured with later `versions` on other hardware. `earlier` counts the place's other valid results. `pareto`: no
    other row of the same hardware is as good in speed, memory, quality and energy and better in one; what was not
    measured counts as the worst; null where speed or memory is unknown."""

    rank: int | None
    standing: Standing = Standing.CURRENT
    superseded: bool = False
    earlier: int = 0
    pareto: bool | None = None
    metric: str
    value: MetricSummary


class Baseline(Frozen):
    """What a class of hardware does on a board without any technique: the current result of torch's empty stack."""

    result_id: str
    hardware: str
    device: DeviceKind
    value: MetricSummary


class BoardName(Frozen):
    """What a board is known by: its workload with its shapes, and its model."""

    workload_digest: str
    workload: dict[str, Any]
    model: str | None


class Board(BoardName):
    """Results that can be compared: one workload with its shapes and its model, ranked by one metric, best first.
    `row_count` counts the rows of all pages. `not_ranked` counts the board's invalid results by reason, whatever the
    filters are. `baselines` are those of the hardware of its rows, where only the best rows are listed. `note` says why
    a board has no rows."""

    metric: str
    unit: str
    better: Better
    row_count: int
    not_ranked: dict[str, int] = Field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()
    note: str | None = None
    next_cursor: str | None = None
    links: dict[str, str] = Field(default_factory=dict)
    rows: tuple[LeaderboardRow, ...]


class LeaderboardPage(Frozen):
    """Boards, the one with the newest result first. `next_cursor` leads to the boards that follow, and is null on the
    last page; `note` says why there is no board. `others` are files of other tools, on the first page where they are
    asked for: what is in them was measured by others and stands on no board."""

    boards: tuple[Board, ...]
    note: str | None = None
    next_cursor: str | None = None
    others: tuple[OthersView, ...] = ()


class HistoryPoint(Frozen):
    """One valid result of a variant on a class of hardware. `ci` is null without a 95% interval."""

    result_id: str
    measured_at: datetime
    standing: Standing
    value: float
    ci: tuple[float, float] | None
    replicates: int
    versions: dict[str, str]
    warnings: tuple[str, ...]


class LevelChange(Frozen):
    """Where the level of a history changes. `ratio` is the new level's geometric mean over that of the level before;
    `chance` is how often so large a difference would be found where nothing changed; `versions` are those that differ
    from the result before: old and new."""

    result_id: str
    measured_at: datetime
    ratio: float
    improved: bool
    chance: float
    versions: dict[str, tuple[str | None, str | None]]


class History(Frozen):
    """A variant on a class of hardware over time, the oldest result first; a change of level takes eight results with
    the metric. `next_cursor` leads to older results."""

    workload: dict[str, Any]
    model: str | None
    label: str
    backend: str
    device: DeviceKind
    hardware: str
    metric: str
    unit: str
    better: Better
    points: tuple[HistoryPoint, ...]
    changes: tuple[LevelChange, ...] = ()
    next_cursor: str | None = None


class Withdrawn(StrEnum):
    """What can be withdrawn."""

    RESULT = "result"
    JOB = "job"


class WithdrawalView(Frozen):
    """What stays of a withdrawn result or job. `withdrawn_by` is the name of the key."""

    kind: Withdrawn
    id: str
    job_id: str | None
    withdrawn_at: datetime
    withdrawn_by: str
    reason: str


class WorkerFacts(Frozen):
    """A worker and what it can run. `gpus` are those that it can see, `vram_bytes` the memory of the smallest."""

    id: str
    host_id: str
    hardware_class: str
    device: DeviceKind
    gpus: tuple[str, ...] = ()
    memory_bytes: int
    vram_bytes: int | None = None
    backends: tuple[str, ...]
    packages: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    downloads: bool = True
    version: str
    software: dict[str, str] = Field(default_factory=dict)
    selftest: SelfTestSummary | None = None


class WorkerView(WorkerFacts):
    """A worker and what it can run. `alive`: it sent a heartbeat within the last lease. `packages` are the optional
    ones that it has, `models` the folders of its model directory and, if it may not download from the hub
    (`downloads`), the hub's models in its cache. `software` are the versions that make results comparable. `selftest`
    is what `optigpu selftest` last found for its device, hardware and software when it started."""

    started_at: datetime
    seen_at: datetime
    alive: bool
    job_id: str | None = None


class SamplesView(Frozen):
    """The raw samples of a result: for each metric one list for each replicate."""

    result_id: str
    samples: dict[str, tuple[tuple[float, ...], ...]]


class ArtifactView(Frozen):
    """A file that was kept with a result, its size and SHA-256 before compression; or the reason why it was not."""

    name: str
    media_type: str
    size_bytes: int | None
    sha256: str | None
    reason: str | None = None
    links: dict[str, str] = Field(default_factory=dict)


class ArtifactsView(Frozen):
    """The files that a result's meters left, by name."""

    result_id: str
    artifacts: tuple[ArtifactView, ...]


class Decision(StrEnum):
    """The conclusion about a metric of two results: different (better or worse), equivalent, or undecided. What is
    counted and not measured is equal or different."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    EQUAL = "equal"
    UNDECIDED = "undecided"


class ComparedResult(Frozen):
    """One side of a comparison."""

    id: str
    label: str
    model: str | None
    workload: dict[str, Any]
    hardware: str
    valid: bool
    warnings: tuple[str, ...] = ()


class MetricComparison(Frozen):
    """One metric of two results. `ratio` is candidate over baseline with its 95% interval; a metric that may be zero or
    negative has a `difference` instead. `paired`: the interval is over pairs (processes side by side, or windows of the
    same text). `chance` is how often a difference as large is seen where there is none. What is `exact` is counted, and
    has no interval. Any other null `ci` or `decision` has a `reason`, and so has a decision from single processes."""

    unit: str
    better: Better
    baseline: float | None
    candidate: float | None
    ratio: float | None = None
    difference: float | None = None
    ci: tuple[float, float] | None = None
    decision: Decision | None = None
    chance: float | None = None
    paired: bool = False
    exact: bool = False
    reason: str | None = None


class Difference(Frozen):
    """A field of the environment or the provenance in which two results differ; null where one has no such field."""

    field: str
    baseline: Any
    candidate: Any


class Comparison(Frozen):
    """Two results, metric by metric, for the metrics that both have. Ratios within 1/(1 + `margin`) and 1 + `margin`
    are taken as equivalent. `notes` say what speaks against comparing them."""

    baseline: ComparedResult
    candidate: ComparedResult
    primary_metric: str
    margin: float
    metrics: dict[str, MetricComparison]
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


class Problem(Frozen):
    """An error, as RFC 9457 has it. `errors` name each field that is wrong and why. `server_time_us` tells a device
    whose clock is wrong what time it is; other errors have no such field."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: tuple[dict[str, Any], ...] = ()
    server_time_us: int | None = None
