"""A sweep over rates stops where the queue grows without an end: what comes faster than that would only wait longer."""

from optigpu.child.messages import Ready
from optigpu.job.spec import Variant
from optigpu.vocabulary import UnsupportedError, canonical_json
from optigpu.workloads.serve import Serve


class Saturation:
    """The lowest rate that saturated each server of a job."""

    def __init__(self) -> None:
        self._lowest: dict[str, float] = {}

    def require_below(self, variant: Variant) -> None:
        """Raises UnsupportedError for a rate above one that the same server could not keep up with."""
        rate = _rate_of(variant)
        lowest = self._lowest.get(_server_of(variant)) if rate else None
        if rate is not None and lowest is not None and rate > lowest:
            raise UnsupportedError(
                f"The queue grew without an end at {lowest:g} requests a second already; {rate:g} was left out."
            )

    def saw(self, variant: Variant, ready: Ready) -> None:
        """Remembers the rate if the queue grew while the process warmed up."""
        rate = _rate_of(variant)
        if rate is not None and ready.facts.load is not None and ready.facts.load.is_saturated:
            server = _server_of(variant)
            self._lowest[server] = min(rate, self._lowest.get(server, rate))


def _rate_of(variant: Variant) -> float | None:
    workload = variant.workload
    return workload.rates[0] if isinstance(workload, Serve) and workload.rates else None


def _server_of(variant: Variant) -> str:
    """What serves, and all of what is asked of it but the rate."""
    asked = {name: value for name, value in variant.workload.identity().items() if name != "rates"}
    stack = [technique.identity() for technique in variant.stack]
    return canonical_json([variant.model, variant.backend, variant.device, stack, asked])
