"""A sweep over rates stops where the queue grows without an end: what comes faster than that would only wait longer.

What disturbs the machine lets a queue grow too. So where the runs of a warm-up show it, which nobody watches, a round
is measured beside the counters, and again while rounds are disturbed. Only one that nothing disturbed ends the sweep.
"""

from collections.abc import Callable
from dataclasses import dataclass

from optigpu.child.messages import Ready
from optigpu.conductor.processes.rounds import PATIENCE
from optigpu.documents.rounds import LoadRun, RoundMark, grew_in_most
from optigpu.job.spec import Measure, Variant
from optigpu.vocabulary import UnsupportedError, canonical_json
from optigpu.workloads.serve import Serve


@dataclass(frozen=True)
class Watched:
    """A round that no figure comes from: its runs, what disturbed it, and how long it took."""

    loads: tuple[LoadRun, ...]
    marks: tuple[RoundMark, ...]
    seconds: float


class Saturation:
    """The lowest rate that saturated each server of a job."""

    def __init__(self) -> None:
        self._lowest: dict[str, float] = {}

    def require_below(self, variant: Variant) -> None:
        rate = _rate_of(variant)
        lowest = self._lowest.get(_server_of(variant)) if rate else None
        if rate is not None and lowest is not None and rate > lowest:
            raise UnsupportedError(
                f"The queue grew without an end at {lowest:g} requests a second already; {rate:g} was left out."
            )

    def judge(self, variant: Variant, ready: Ready, measure: Measure, watch: Callable[[], Watched]) -> None:
        """Remembers the rate if the queue grew while the process warmed up, and in a round that nothing disturbed.
        `watch` measures one. Where PATIENCE times the least time brings no undisturbed one, the sweep goes on."""
        rate, load = _rate_of(variant), ready.facts.load
        if rate is None or load is None or not load.is_saturated:
            return
        found = watch()
        spent_s = found.seconds
        while found.marks and spent_s < PATIENCE * measure.min_seconds:
            found = watch()
            spent_s += found.seconds
        if not found.marks and grew_in_most(found.loads):
            server = _server_of(variant)
            self._lowest[server] = min(rate, self._lowest.get(server, rate))


def _rate_of(variant: Variant) -> float | None:
    workload = variant.workload
    return workload.rates[0] if isinstance(workload, Serve) and workload.rates else None


def _server_of(variant: Variant) -> str:
    """What serves, and all of what is asked of it but the rate."""
    asked = {name: value for name, value in variant.workload.identity().items() if name != "rates"}
    stack = [technique.identity() for technique in variant.stack]
    return canonical_json([variant.model, variant.engine, variant.device, stack, asked])
