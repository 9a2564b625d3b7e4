"""A device's figures from its report: each with its spread over the run's windows, or the reason why there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.documents.devices import EDGE_METRICS, CostAssumptions, EdgeFigure, EdgeMetric
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
