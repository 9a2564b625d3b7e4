"""What the leaderboard keeps of a result: an entry, and what of its metrics orders the rows of a board."""

import hashlib
import re
from collections.abc import Iterable

from optigpu.documents.result import MetricSummary, Result
from optigpu.documents.versions import compared, versions_of
from optigpu.documents.views import RowFacts, Standing
from optigpu.store.tables import LeaderboardEntry, MetricRow
from optigpu.vocabulary import COUNTED_METRICS, METRICS, Better, DeviceKind, Document

NO_PEAKS = (DeviceKind.CPU, DeviceKind.MPS)
"""Devices of whose memory torch keeps no peak: a result's size is that of its weights there."""
ENERGIES = ("j_per_token", "j_per_image")
RATES = ("images_per_s", "latency_s", "power_w")
COMPARED_WITH_DEVICES = (*RATES, "j_per_image")
DIGITS = 15
"""Of each number of a version, so that text is ordered as numbers are."""


def board_number(workload_digest: str, source: str) -> int:
    """The number of the board of a workload and a source: 64 bits of a digest of both."""
    made = hashlib.sha256(f"{source}|{workload_digest}".encode()).digest()
    return int.from_bytes(made[:8], signed=True)


def age(backend: str, versions: Document) -> bytes:
    """Versions as something that databases can compare: later ones are larger.

    Only the numbers of a release are read: 2.13.0+cpu, 2.13.0+cu130 and 2.13.0rc1 are the same version. Commits have no
    order, so results of different commits of one version are measured with the same versions.
    """
    # A space is less than a point, so that 2.13 of one package comes before 2.13.0, whatever the next package is.
    releases = (re.match(r"\d+(\.\d+)*", versions.get(package, "")) for package in compared(backend))
    numbers = (release[0].split(".") if release else () for release in releases)
    padded = ([number.lstrip("0")[-DIGITS:].zfill(DIGITS) for number in each] for each in numbers)
    return b" ".join(".".join(each).encode() for each in padded)


def metric_row(result: Result, name: str, metric: MetricSummary) -> MetricRow:
    """A metric that has a value, as it is sorted and filtered by."""
    assert metric.value is not None
    exact = (metric.value, metric.value) if name in COUNTED_METRICS else (None, None)
    low, high = metric.ci or exact
    return MetricRow(
        result_id=result.id,
        name=name,
        value=metric.value,
        low=low,
        high=high,
        summary=metric.model_dump(mode="json"),
        board=board_number(result.variant.workload_digest, result.source),
        standing=first_standing(result),
        unsure=low is None,
        place=place_of_value(name, metric.value),
        hardware_class=result.environment.hardware_class,
        backend=result.variant.backend,
        stack=stack_text(techniques_of(result)),
        top1=_value(result, "top1_agreement"),
        kld=_value(result, "kld_mean"),
        clean=not result.verdict.warnings,
    )


def place_of_value(metric: str, value: float) -> float:
    """The smaller, the better."""
    return -value if METRICS[metric].better is Better.HIGHER else value


def first_standing(result: Result) -> Standing:
    """Before it is compared with others of its place: most have none, and rows that never changed read faster."""
    return Standing.CURRENT if result.verdict.valid else Standing.INVALID


def entry_of(result: Result) -> LeaderboardEntry:
    """The entry of a result before it is compared with others."""
    variant, verdict = result.variant, result.verdict
    primary = result.metrics.get(variant.primary_metric)
    versions = versions_of(variant.backend, result.environment.software)
    score = _value(result, variant.primary_metric)
    return LeaderboardEntry(
        result_id=result.id,
        board=board_number(variant.workload_digest, result.source),
        variant_digest=variant.variant_digest,
        hardware_class=result.environment.hardware_class,
        source=result.source,
        standing=first_standing(result),
        superseded=False,
        earlier=0,
        measured_at=result.created_at,
        workload=variant.workload["kind"],
        model=variant.model,
        backend=variant.backend,
        device=variant.device,
        replicates=primary.replicates if primary else 0,
        warnings=" ".join(verdict.warnings),
        reasons=" ".join(verdict.reasons),
        age=age(variant.backend, versions),
        score=None if score is None else -place_of_value(variant.primary_metric, score),
        size_bytes=_value(result, "weight_bytes" if variant.device in NO_PEAKS else "peak_bytes"),
        kld=_value(result, "kld_mean"),
        top1=_value(result, "top1_agreement"),
        energy_j=next((joules for name in ENERGIES if (joules := _value(result, name)) is not None), None),
        pareto=None,
        shown=_row_facts(result, versions).model_dump(mode="json"),
        edge=_with_devices(result),
    )


def stack_text(techniques: Iterable[str]) -> str:
    """The names of a stack, each between two spaces, so that one of them can be looked for."""
    return " ".join(("", *techniques, ""))


def techniques_of(result: Result) -> tuple[str, ...]:
    """The names of the stack's techniques, in its order."""
    return tuple(technique["name"] for technique in result.variant.stack)


def _row_facts(result: Result, versions: dict[str, str]) -> RowFacts:
    variant, verdict = result.variant, result.verdict
    return RowFacts(
        result_id=result.id,
        job_id=result.job_id,
        source=result.source,
        measured_at=result.created_at,
        workload=variant.workload,
        workload_digest=variant.workload_digest,
        variant_digest=variant.variant_digest,
        model=variant.model,
        label=variant.label,
        techniques=techniques_of(result),
        backend=variant.backend,
        device=variant.device,
        hardware=result.environment.hardware_class,
        versions=versions,
        weight_bytes=_value(result, "weight_bytes"),
        peak_bytes=_value(result, "peak_bytes"),
        top1_agreement=_value(result, "top1_agreement"),
        kld_mean=_value(result, "kld_mean"),
        j_per_token=_value(result, "j_per_token"),
        warnings=tuple(map(str, verdict.warnings)),
        reasons=tuple(map(str, verdict.reasons)),
        notes=verdict.notes,
    )


def _value(result: Result, name: str) -> float | None:
    metric = result.metrics.get(name)
    return metric.value if metric else None


def _with_devices(result: Result) -> Document | None:
    """What a row of a worker's result is made of, as its entry keeps it; None for what does not classify images."""
    facts = result.facts
    if facts.network is None:
        return None
    metrics = {name: result.metrics[name] for name in COMPARED_WITH_DEVICES if name in result.metrics}
    return {
        "network": facts.network.model_dump(mode="json"),
        "weight_hash": facts.weights.hash if facts.weights else None,
        "energy": {"source": facts.energy.source, "scope": facts.energy.scope} if facts.energy else None,
        "metrics": {name: metric.model_dump(mode="json") for name, metric in metrics.items()},
    }
