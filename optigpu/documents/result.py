"""The documents of a measurement: measurements, summaries, verdict, environment, result. Data only:
`optigpu.statistics.intervals` computes the summaries from samples."""

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Bound
from optigpu.documents.rounds import RoundRecord, counted
from optigpu.vocabulary import (
    METRICS,
    SCHEMA_VERSION,
    Better,
    DeviceKind,
    Frozen,
    Role,
    Scheduler,
    VariantStatus,
)

Samples = tuple[tuple[float, ...], ...]
"""Raw samples: one inner tuple for each replicate (process), in the order in which they were taken."""


class Measurement(Frozen):
    """Raw samples of one metric, or the reason why there are none. `samples` hold one tuple for each replicate: one
    number for each request, or a single number for what a process has only once, such as its peak memory."""

    name: str
    samples: Samples = ()
    reason: str | None = None

    @property
    def unit(self) -> str:
        """The metric's unit, from the vocabulary."""
        return METRICS[self.name].unit

    @model_validator(mode="after")
    def _known_and_explained(self) -> Self:
        if self.name not in METRICS:
            raise ValueError(f"There is no metric {self.name!r}; the metrics are {', '.join(METRICS)}")
        if not any(self.samples) and self.reason is None:
            raise ValueError(f"{self.name} needs samples, or the reason why there are none")
        return self


class MetricSummary(Frozen):
    """One value of a metric with its interval, its percentiles and its variation. `value` is the median over requests,
    averaged over the processes (geometrically where all are positive), or null with a `reason`. `ci` is its 95%
    interval, null where there is too little to know one, and `freedom` the degrees of freedom of its Student's t. Of
    several processes it speaks of others too; of one it is that process's own. `n` counts the samples, `n_effective`
    how many independent ones a process's are worth (an average, null for fewer than 6), `replicates` the processes;
    `per_replicate` holds each process's median. `beside` says for each variant that was side by side, by its index, how
    many times its figure this one's is, process by process; it is empty for metrics without a sample of each request.
    `cv_within` is the coefficient of variation of requests within a process (averaged), `cv_between` that of the
    processes' medians. `p50` to `p99` are percentiles of each process, averaged as `value` is, and `p90_upper` and its
    like 95% upper bounds of them, over processes; null where requests or processes are too few, and `reason` says what
    it takes. `cost_bound` is the share of the speed that disturbances can have cost at most, and `ci` reaches to where
    the value would be without them; without a bound there is no `ci`."""

    unit: str
    value: float | None
    ci: tuple[float, float] | None = None
    freedom: float | None = None
    n: int = 0
    n_effective: float | None = None
    replicates: int = 0
    better: Better
    mean: float | None = None
    cv_within: float | None = None
    cv_between: float | None = None
    per_replicate: tuple[float, ...] = ()
    beside: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    p50: float | None = None
    p90: float | None = None
    p90_upper: float | None = None
    p95: float | None = None
    p95_upper: float | None = None
    p99: float | None = None
    p99_upper: float | None = None
    reason: str | None = None
    cost_bound: float | None = 0.0

    @property
    def gains(self) -> dict[int, tuple[float, ...]]:
        """How many times better it is than each of those that it was beside."""
        if self.better is Better.HIGHER:
            return self.beside
        return {other: tuple(1 / factor for factor in factors) for other, factors in self.beside.items()}


class VerdictReason(StrEnum):
    """Why a result is not valid and is not ranked."""

    OUTPUT_INVALID = "output_invalid"
    QUALITY_BELOW_GATE = "quality_below_gate"
    LOSS_DIVERGED = "loss_diverged"
    LITTLES_LAW = "littles_law"
    CACHED_RESULT = "cached_result"
    CLOCK_CONTRADICTED = "clock_contradicted"
    HARNESS_REPLACED = "harness_replaced"
    WARM_UP_SLEPT = "warm_up_slept"
    WORKED_WHILE_IDLE = "worked_while_idle"
    UNDECLARED_ROUNDING = "undeclared_rounding"
    NOT_THE_MODEL = "not_the_model"
    WRONG_DEVICE = "wrong_device"
    THROTTLED = "throttled"
    FOREIGN_PROCESS = "foreign_process"
    DRIFT = "drift"
    INTERRUPTED = "interrupted"


class VerdictWarning(StrEnum):
    """What a reader should know of a result that is ranked."""

    SINGLE_REPLICATE = "single_replicate"
    INCOMPLETE = "incomplete"
    NOT_CONVERGED = "not_converged"
    FEW_SAMPLES = "few_samples"
    DISTURBED = "disturbed"
    CLOCK_UNSTABLE = "clock_unstable"
    SHARED_HOST = "shared_host"
    HANDICAPPED_BUILD = "handicapped_build"
    PARTLY_QUANTIZED = "partly_quantized"
    UNUSED_TENSORS = "unused_tensors"
    SATURATED = "saturated"
    SATURATION_UNDECIDED = "saturation_undecided"


class Verdict(Frozen):
    """Whether a result may be ranked. `notes` explain each reason, then each warning. `cost_bound` is the share of the
    speed that disturbances can have cost at most, for which the intervals were widened; null where it has no bound."""

    valid: bool
    reasons: tuple[VerdictReason, ...] = ()
    warnings: tuple[VerdictWarning, ...] = ()
    notes: tuple[str, ...] = ()
    cost_bound: float | None = 0.0

    @property
    def reason_notes(self) -> tuple[str, ...]:
        """The notes of the reasons, without those of the warnings."""
        return self.notes[: len(self.reasons)]

    @model_validator(mode="after")
    def _valid_means_no_reasons(self) -> Self:
        if self.valid == bool(self.reasons):
            raise ValueError("a valid verdict has no reasons, and one that is not valid needs at least one")
        return self


class HostIdSource(StrEnum):
    """What identifies a host, the most reliable first. A container has its own `network_address` and `hostname`."""

    FIRMWARE = "firmware"
    GPUS = "gpus"
    MACHINE_ID = "machine_id"
    NETWORK_ADDRESS = "network_address"
    HOSTNAME = "hostname"


class Accelerator(Frozen):
    """One GPU as its driver names it. `architecture` is what its code is compiled for, where that is not a compute
    capability ("gfx942"). `power_limit_w` is the limit that the driver enforces. Null: the driver does not say."""

    kind: DeviceKind = DeviceKind.CUDA
    name: str
    memory_bytes: int
    uuid: str
    architecture: str | None = None
    compute_capability: str | None = None
    clock_max_hz: int | None = None
    memory_clock_max_hz: int | None = None
    power_limit_w: float | None = None
    persistence_mode: bool | None = None


class CpuSetup(Frozen):
    """How the CPU is set up. Null: not reported. `max_hz` is the most that the hardware does, `limit_hz` the most that
    the governor may choose. `governor` names those in use. `hypervisor`: whether the CPU itself announces one."""

    base_hz: int | None = None
    max_hz: int | None = None
    limit_hz: int | None = None
    governor: str | None = None
    boost: bool | None = None
    smt: bool | None = None
    numa_nodes: int | None = None
    hypervisor: bool | None = None


class Allocation(Frozen):
    """What a scheduler gave to the job. `gres` are generic resources (gpu:1), `cpuset` the CPUs (0-3,8). `node_shared`:
    whether other jobs may run on the node. Null: the scheduler did not say."""

    scheduler: Scheduler
    job_id: str
    gres: str | None = None
    cpuset: str | None = None
    node_shared: bool | None = None


class Environment(Frozen):
    """The machine of a measurement. Results are comparable when `hardware_class` is equal. `host_id` tells two machines
    of one class apart without naming them. The hardware's fingerprint is the same after a reboot and in another
    container with the same share of the machine; the software's changes with any version. `cpu_features` are the
    kernel's flag names, `compiler` the C++ compiler's version line, `cuda` the newest version that the driver can run,
    `container` the kind of container, and `image` what its builder called it. `git_revision` is the commit of this
    package where it runs from a checkout, or what the image's builder recorded; `git_dirty` whether the package differs
    from it. `variables` are environment variables that the measuring processes inherited and that may change what is
    measured. `allocation` is what a cluster's scheduler gave. Null: there is none, or it is unknown."""

    hardware_class: str
    hardware_fingerprint: str | None = None
    software_fingerprint: str | None = None
    host_id: str
    host_id_source: HostIdSource | None = None
    cpu_model: str
    cpu_cores: int
    cpu_features: tuple[str, ...] = ()
    cpu_setup: CpuSetup = CpuSetup()
    memory_bytes: int
    accelerators: tuple[Accelerator, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    compiler: str | None = None
    os: str
    container: str | None = None
    image: str | None = None
    git_revision: str | None = None
    git_dirty: bool | None = None
    software: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    allocation: Allocation | None = None

    def has(self, device: DeviceKind) -> bool:
        """Whether this machine has such a device."""
        return device is DeviceKind.CPU or bool(self.gpus(device))

    def gpus(self, device: DeviceKind) -> tuple[Accelerator, ...]:
        """Its GPUs of that kind."""
        return tuple(gpu for gpu in self.accelerators if gpu.kind is device)


class VariantSummary(Frozen):
    """The variant of a result, as it is shown and ranked. `stack` holds each technique's parameters, `workload` the
    workload's; both as plain JSON, because a stored result is never validated again with today's models."""

    index: int
    role: Role
    label: str
    workload: dict[str, Any]
    model: str | None
    backend: str
    endpoint: str | None = None
    device: DeviceKind
    stack: tuple[dict[str, Any], ...]
    workload_digest: str
    variant_digest: str
    primary_metric: str


class Provenance(Frozen):
    """The exact origin of a result. `spec_digest` is the SHA-256 of the job's canonical spec. `model_revision` is a
    hub's commit, or the digest of a preset's architecture. `weight_hash` is the SHA-256 of the files that the weights
    came from (of the lines of `sha256sum` where they are several), or the digest of the recipe that drew random ones.
    `dataset_hash` is that of the text or dataset of the quality. What is null has its reason in `reasons`."""

    spec_digest: str
    seed: int
    model_revision: str | None = None
    weight_hash: str | None = None
    weight_hash_of: Literal["files", "recipe"] | None = None
    dataset_hash: str | None = None
    optigpu_version: str
    git_revision: str | None = None
    git_dirty: bool | None = None
    reasons: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _explained(self) -> Self:
        fields = ("model_revision", "weight_hash", "dataset_hash", "git_revision")
        silent = [name for name in fields if getattr(self, name) is None and name not in self.reasons]
        if silent:
            raise ValueError(f"{', '.join(silent)} needs a value, or the reason why there is none")
        return self


class Result(Frozen):
    """All measurements of one variant, where they were taken, and whether they count. `facts` say how the variant ran.
    `rounds` are those of each replicate, each with what disturbed it; empty in results from before they were
    recorded."""

    id: str
    job_id: str | None = None
    source: str = "worker"
    schema_version: int = SCHEMA_VERSION
    created_at: datetime
    variant: VariantSummary
    verdict: Verdict
    metrics: dict[str, MetricSummary]
    bound: Bound | None = None
    facts: RunFacts = RunFacts()
    rounds: tuple[tuple[RoundRecord, ...], ...] = ()
    environment: Environment
    provenance: Provenance | None = None
    seed: int


class Rough(Frozen):
    """A variant's first figures: its metric by short requests, and the quality of a few tokens.

    They are shown at once and are no result. `ratio` is to the baseline, above 1 when this is better; the 95% intervals
    include what processes differ by. Null: not known yet, or not at all.
    """

    metric: str
    value: float
    ci: tuple[float, float]
    ratio: float | None = None
    ratio_ci: tuple[float, float] | None = None
    weight_bytes: int | None = None
    kld_mean: float | None = None
    top1_agreement: float | None = None


class Outcome(Frozen):
    """How one variant of a job ended: a result with its raw samples, or the reason why there is none. `artifacts` are
    files that meters left, by name, as long as the outcome's listener runs. `host_memory` says that the kernel killed a
    process of it because the host had no memory left. `rough` is what was known by then of a variant that was not
    measured."""

    index: int
    status: VariantStatus
    reason: str | None = None
    result: Result | None = None
    samples: dict[str, Samples] = Field(default_factory=dict)
    artifacts: dict[str, Path] = Field(default_factory=dict)
    host_memory: bool = False
    rough: Rough | None = None

    @model_validator(mode="after")
    def _result_or_reason(self) -> Self:
        if (self.result is None) == (self.reason is None):
            raise ValueError("an outcome needs either a result or a reason, and not both")
        return self

    def counted(self, metric: str) -> Samples:
        """The samples of a metric of requests that its figures come from: without the rounds that were set aside."""
        rounds = self.result.rounds if self.result else ()
        found = self.samples[metric]
        of_each = zip(rounds or ((),) * len(found), found, strict=True)
        return tuple(counted(records, values) for records, values in of_each)


OF_THE_OUTPUT = frozenset(
    {
        VerdictReason.OUTPUT_INVALID,
        VerdictReason.QUALITY_BELOW_GATE,
        VerdictReason.LOSS_DIVERGED,
        VerdictReason.LITTLES_LAW,
        VerdictReason.CACHED_RESULT,
        VerdictReason.CLOCK_CONTRADICTED,
        VerdictReason.HARNESS_REPLACED,
        VerdictReason.WARM_UP_SLEPT,
        VerdictReason.WORKED_WHILE_IDLE,
        VerdictReason.UNDECLARED_ROUNDING,
        VerdictReason.NOT_THE_MODEL,
        VerdictReason.WRONG_DEVICE,
    }
)
"""The reasons that lie in the variant itself. All others are disturbances, which variants side by side share."""


class Gain(Frozen):
    """A ratio of two variants' primary metric, above 1 when the candidate is better, with its 95% interval. `reasons`
    say why it is not valid: those of either side, but where both took turns only those in `OF_THE_OUTPUT`."""

    ratio: float
    ci: tuple[float, float] | None
    compared_with: int
    reasons: tuple[VerdictReason, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether the ratio holds; it may, while a side's own figure does not."""
        return not self.reasons


class Payback(Frozen):
    """The number of steps (requests) after which compiling has saved as much time as it took, relative to the variant
    `compared_with` without compilation; `ci` is its 95% interval. Where either is null, `reason` says why."""

    steps: float | None
    ci: tuple[float, float] | None = None
    compared_with: int
    reason: str | None = None


class AttributionRow(Frozen):
    """One variant of a job and what it gained: `speedup` relative to the baseline; `alone`, what the technique buys by
    itself (relative to what it must be compared with); `added`, on top of the prefix before it; `left_out`, what the
    whole stack loses without it and without the techniques in `left_out_with`, which require it; `over_compiled`, of a
    kernel, relative to the compiled reference. `payback` is null where nothing was compiled, or where every variant
    that it could be compared with is compiled too."""

    index: int
    role: Role
    label: str
    status: VariantStatus
    reason: str | None = None
    technique: str | None = None
    speedup: Gain | None = None
    alone: Gain | None = None
    added: Gain | None = None
    left_out: Gain | None = None
    left_out_with: tuple[str, ...] = ()
    over_compiled: Gain | None = None
    payback: Payback | None = None
    rough: Rough | None = None


class Attribution(Frozen):
    """The gain of each technique. `best` is the index of the fastest valid variant, or of the highest valid speedup.
    Where variants were not side by side, `baseline_again` is the baseline at the end of the job relative to itself at
    the start: a ratio far from 1 means that the machine changed."""

    metric: str
    rows: tuple[AttributionRow, ...]
    best: int | None = None
    baseline_again: Gain | None = None
