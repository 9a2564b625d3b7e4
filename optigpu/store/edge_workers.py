"""Workers' current results of the network of an edge model: what stands beside the devices."""

import math
from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.documents.edge import EdgeWorkerRow, Likeness
from optigpu.documents.facts import NetworkFacts
from optigpu.documents.views import RowFacts, Standing
from optigpu.store.tables import LeaderboardEntry
from optigpu.vocabulary import Document

IMAGES = "classify"
"""The workload that devices run."""
MOST_RESULTS = 2000
"""The newest of the current results of that workload that are looked at."""
NOT_MEASURED = "Its energy was not measured."


class WorkersBeside:
    """The current results of image classifiers; they are read when the first board asks for them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._entries: Sequence[LeaderboardEntry] | None = None

    def of(self, model_sha256: str, network: NetworkFacts | None) -> tuple[EdgeWorkerRow, ...]:
        """The results of a model's file or network, by energy per inference; those without it last, fastest first."""
        found = [
            _row(entry, likeness)
            for entry in self._all()
            if (likeness := likeness_of(entry.edge or {}, model_sha256, network))
        ]
        return tuple(sorted(found, key=_order))

    def _all(self) -> Sequence[LeaderboardEntry]:
        if self._entries is None:
            query = select(LeaderboardEntry).where(
                LeaderboardEntry.workload == IMAGES,
                LeaderboardEntry.standing == Standing.CURRENT,
                LeaderboardEntry.source == "worker",
            )
            newest_first = query.order_by(LeaderboardEntry.result_id.desc()).limit(MOST_RESULTS)
            self._entries = self._session.scalars(newest_first).all()
        return self._entries


def likeness_of(edge: Document, model_sha256: str, network: NetworkFacts | None) -> Likeness | None:
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


def _order(row: EdgeWorkerRow) -> tuple[float, float, str]:
    energy = math.inf if row.energy_per_inference_j is None else row.energy_per_inference_j
    return energy, -(row.images_per_s or 0.0), row.result_id


def _row(entry: LeaderboardEntry, likeness: Likeness) -> EdgeWorkerRow:
    """The energy of an image is the power while requests run, idle included, over the rate at which they run."""
    shown, edge = RowFacts.model_validate(entry.shown), entry.edge or {}
    metrics: Mapping[str, Document] = edge["metrics"]
    rate, power = _value(metrics, "images_per_s"), _value(metrics, "power_w")
    energy = power / rate if power and rate else None
    sensor = edge.get("energy") or {}
    return EdgeWorkerRow(
        result_id=entry.result_id,
        job_id=shown.job_id,
        hardware=entry.hardware_class,
        device=entry.device,
        backend=entry.backend,
        label=shown.label,
        model=entry.model,
        likeness=likeness,
        batch_size=shown.workload.get("batch_size"),
        measured_at=entry.measured_at,
        images_per_s=rate,
        latency_s=_value(metrics, "latency_s"),
        power_w=power,
        energy_per_inference_j=energy,
        energy_above_idle_j=_value(metrics, "j_per_image"),
        fps_per_watt=1 / energy if energy else None,
        energy_source=sensor.get("source"),
        energy_scope=sensor.get("scope"),
        reason=None if energy else _why_no_energy(metrics),
        warnings=tuple(entry.warnings.split()),
    )


def _why_no_energy(metrics: Mapping[str, Document]) -> str:
    """The reason of the power, which every meter of energy gives."""
    return str((metrics.get("power_w") or {}).get("reason") or NOT_MEASURED)


def _value(metrics: Mapping[str, Document], name: str) -> float | None:
    value: float | None = (metrics.get(name) or {}).get("value")
    return value
