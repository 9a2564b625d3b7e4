"""The parts of a stored result that a comparison reads; whatever else it holds is ignored."""

from pydantic import ConfigDict, Field

from optigpu.vocabulary import Better, Frozen


class _Read(Frozen):
    """A part of a document of an older or newer version."""

    model_config = ConfigDict(extra="ignore")


class StoredSummary(_Read):
    unit: str
    better: Better
    value: float | None
    ci: tuple[float, float] | None = None
    freedom: float | None = None
    replicates: int = 0
    per_replicate: tuple[float, ...] = ()
    # How many times the figure of each variant that was side by side this one is, process by process.
    beside: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    reason: str | None = None
    # How far `ci` was widened towards the undisturbed side; None where that has no bound.
    cost_bound: float | None = 0.0

    @property
    def disturbance(self) -> float:
        """The undisturbed value is between the value and so many times the value."""
        left = 1 - (self.cost_bound or 0.0)
        return left if self.better is Better.LOWER else 1 / left

    @property
    def measured_ci(self) -> tuple[float, float] | None:
        if self.ci is None:
            return None
        low, high = self.ci
        return (
            (low / self.disturbance, high) if self.better is Better.LOWER else (low, high / self.disturbance)
        )

    @property
    def figures(self) -> tuple[float, ...]:
        return (*self.per_replicate, *(() if self.value is None else (self.value,)))


class StoredVariant(_Read):
    index: int | None = None
    label: str
    workload: dict[str, object]
    model: str | None
    workload_digest: str
    primary_metric: str


class StoredVerdict(_Read):
    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class StoredEnvironment(_Read):
    hardware_class: str


class StoredProvenance(_Read):
    spec_digest: str | None = None
    weight_hash: str | None = None


class StoredQuality(_Read):
    """On what text quality was measured, and how far its figures move without a part of it."""

    tokens_sha256: str | None = None
    without_part: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class StoredFacts(_Read):
    quality: StoredQuality | None = None
    side_by_side: tuple[int, ...] = ()


class StoredResult(_Read):
    id: str
    job_id: str | None = None
    source: str = "worker"
    variant: StoredVariant
    verdict: StoredVerdict
    metrics: dict[str, StoredSummary]
    environment: StoredEnvironment
    provenance: StoredProvenance | None = None
    facts: StoredFacts = StoredFacts()

    @property
    def text(self) -> str | None:
        return self.facts.quality.tokens_sha256 if self.facts.quality else None

    @property
    def weights(self) -> str:
        return (self.provenance and self.provenance.weight_hash) or "not recorded"

    @property
    def spec_digest(self) -> str | None:
        return self.provenance.spec_digest if self.provenance else None

    def without_part(self, name: str) -> tuple[float, ...]:
        """A quality figure without one part of its text after the other; empty if it has none."""
        return self.facts.quality.without_part.get(name, ()) if self.facts.quality else ()

    def factors_over(self, name: str, other: "StoredResult") -> tuple[float, ...]:
        """How many times the other's figure this one is, process by process; empty where turns do not say."""
        index = other.variant.index
        return (
            self.metrics[name].beside.get(index, ()) if index is not None and self.was_beside(other) else ()
        )

    def was_beside(self, other: "StoredResult") -> bool:
        """Whether the two are variants of one job whose processes took turns, replicate by replicate."""
        mine, its = self.variant.index, other.variant.index
        same_job = (self.job_id, self.spec_digest) == (other.job_id, other.spec_digest)
        return (
            same_job and mine != its and mine in other.facts.side_by_side and its in self.facts.side_by_side
        )
