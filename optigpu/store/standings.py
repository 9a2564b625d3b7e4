"""Which result of a place on the leaderboard is its current one: the best supported of the latest versions.

A place is a variant of a workload on a class of hardware, from one source. Of its valid results those with the latest
versions count; of these one without warnings before one with, then the one with more processes, then the newer one. So
a careless rerun does not take the place of a careful measurement. The others are the place's history: withdrawing the
current result brings the next one back.
"""

import re
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, select, update
from sqlalchemy.orm import Session

from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Result
from optigpu.documents.versions import compared, versions_of
from optigpu.documents.views import Standing
from optigpu.store.statements import take_turns
from optigpu.store.tables import LeaderboardEntry
from optigpu.vocabulary import METRICS, Better, DeviceKind, Document

Place = tuple[str, str, str, str]
"""A place: the workload's digest, the variant's digest, the hardware class, the source."""


def enter(session: Session, result: Result) -> None:
    """Enters a result that was just stored at its place."""
    entry = _entry(result)
    session.add(entry)
    session.flush()
    settle(session, place_of(entry))


NO_PEAKS = (DeviceKind.CPU, DeviceKind.MPS)
"""Devices of whose memory torch keeps no peak: a result's size is that of its weights there."""


def place_of(entry: LeaderboardEntry) -> Place:
    return (entry.workload_digest, entry.variant_digest, entry.hardware_class, entry.source)


def settle(session: Session, place: Place) -> None:
    """Chooses the current result of a place again. Transactions that settle the same place follow each other."""
    take_turns(session, "|".join(place))
    valid = at(place), LeaderboardEntry.standing != Standing.INVALID
    found = session.execute(select(*_SUPPORT).where(*valid)).all()
    session.execute(update(LeaderboardEntry).where(*valid).values(standing=Standing.EARLIER))
    if found:
        best = LeaderboardEntry.result_id == max(found, key=_support).result_id
        session.execute(update(LeaderboardEntry).where(best).values(standing=Standing.CURRENT))


def at(place: Place) -> ColumnElement[bool]:
    """The entries of a place."""
    workload, variant, hardware, source = place
    here: ColumnElement[bool] = (
        (LeaderboardEntry.workload_digest == workload)
        & (LeaderboardEntry.variant_digest == variant)
        & (LeaderboardEntry.hardware_class == hardware)
        & (LeaderboardEntry.source == source)
    )
    return here


def age(backend: str, versions: Document) -> tuple[tuple[int, ...], ...]:
    """Versions as something to compare: later ones are larger.

    Only the numbers of a release are read: 2.13.0+cpu, 2.13.0+cu130 and 2.13.0rc1 are the same version. Commits have no
    order, so results of different commits of one version are measured with the same versions.
    """
    return tuple(_release(versions.get(package, "")) for package in compared(backend))


_SUPPORT = (
    LeaderboardEntry.result_id,
    LeaderboardEntry.backend,
    LeaderboardEntry.versions,
    LeaderboardEntry.warnings,
    LeaderboardEntry.replicates,
    LeaderboardEntry.measured_at,
)


def _support(entry: Row[str, str, dict[str, Any], str, int, datetime]) -> tuple[object, ...]:
    """What the best supported result has the most of, the weightiest first."""
    versions = age(entry.backend, entry.versions)
    return versions, not entry.warnings, entry.replicates, entry.measured_at, entry.result_id


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def _entry(result: Result) -> LeaderboardEntry:
    variant, verdict = result.variant, result.verdict
    metrics = {name: summary.model_dump(mode="json") for name, summary in result.metrics.items()}
    primary = result.metrics.get(variant.primary_metric)
    return LeaderboardEntry(
        result_id=result.id,
        workload_digest=variant.workload_digest,
        variant_digest=variant.variant_digest,
        hardware_class=result.environment.hardware_class,
        source=result.source,
        standing=Standing.EARLIER if verdict.valid else Standing.INVALID,
        measured_at=result.created_at,
        workload=variant.workload["kind"],
        model=variant.model,
        backend=variant.backend,
        device=variant.device,
        techniques="|" + "".join(f"{technique['name']}|" for technique in variant.stack),
        primary_metric=variant.primary_metric,
        replicates=primary.replicates if primary else 0,
        warnings=" ".join(verdict.warnings),
        reasons=" ".join(verdict.reasons),
        versions=versions_of(variant.backend, result.environment.software),
        score=_score(metrics, variant.primary_metric),
        size_bytes=_value(metrics, "weight_bytes" if variant.device in NO_PEAKS else "peak_bytes"),
        summary={
            "job_id": result.job_id,
            "label": variant.label,
            "workload": variant.workload,
            "techniques": [technique["name"] for technique in variant.stack],
            "warnings": list(verdict.warnings),
            "notes": list(verdict.notes),
            "metrics": metrics,
            **_for_the_edge(result.facts),
        },
    )


def _for_the_edge(facts: RunFacts) -> dict[str, Any]:
    """What the edge leaderboard finds a result by, and what measured its energy; only of what classifies images."""
    if facts.network is None:
        return {}
    return {
        "network": facts.network.model_dump(mode="json"),
        "weight_hash": facts.weights.hash if facts.weights else None,
        "energy": {"source": facts.energy.source, "scope": facts.energy.scope} if facts.energy else None,
    }


def _score(metrics: dict[str, Any], primary: str) -> float | None:
    value = _value(metrics, primary)
    return -value if value is not None and METRICS[primary].better is Better.LOWER else value


def _value(metrics: dict[str, Any], name: str) -> float | None:
    value: float | None = metrics.get(name, {}).get("value")
    return value
