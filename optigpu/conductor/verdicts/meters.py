"""What disturbed the reading of a meter that times requests, and what that can have cost its figures at most."""

from collections.abc import Callable, Iterator, Sequence

from optigpu.conductor.processes.metering import MeterReading
from optigpu.conductor.verdicts import disturbance
from optigpu.conductor.verdicts.cost import MOST, Evidence, together
from optigpu.conductor.verdicts.disturbance import Disturbance
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.conductor.verdicts.marks import Yardstick
from optigpu.documents.rounds import RoundMark

_SENTENCES: dict[RoundMark, Callable[[Sequence[HostSample], Yardstick], Disturbance | None]] = {
    RoundMark.OTHERS: disturbance.foreign,
    RoundMark.OTHERS_ON_GPU: lambda samples, _: disturbance.foreign_on_gpu(samples),
    RoundMark.STEAL: lambda samples, _: disturbance.stolen(samples, least=0.0),
    RoundMark.QUOTA: lambda samples, _: disturbance.quota(samples),
    RoundMark.HEAT: lambda samples, _: disturbance.hot(samples) or disturbance.gpu_heat(samples),
    RoundMark.SUSPENDED: lambda samples, _: disturbance.suspended(samples),
    RoundMark.SLOW_PROBE: disturbance.slow_probe,
    RoundMark.UNCOUNTED: lambda samples, _: disturbance.uncounted(samples),
}
_UNBOUNDED = frozenset({RoundMark.OTHERS_ON_GPU, RoundMark.SUSPENDED, RoundMark.UNCOUNTED})
"""What these cost the counters do not say."""


def disturbed(evidence: Sequence[Evidence]) -> str | None:
    """A sentence for each kind of disturbance of each such meter, and the bound of what all can have cost."""
    said: dict[tuple[str, RoundMark], str] = {}
    for reading, sample, yardstick in _timed(evidence):
        meter = reading.metered.meter
        for mark in yardstick.marks(sample):
            found = _SENTENCES[mark]([sample], yardstick)
            if found:
                said.setdefault((meter, mark), found.sentence(f"while the {meter} meter was read"))
    if not said:
        return None
    known = [bound for bound in bounds(evidence).values() if bound is not None]
    cost = f"This can have cost up to {100 * max(known):.0f}%." if known else "What this cost is not known."
    return f"{' '.join(said.values())} {cost}"


def bounds(evidence: Sequence[Evidence]) -> dict[str, float | None]:
    """For each metric of such a meter, the share of it that disturbances can have cost at most.

    None where that is not known; metrics whose readings were all undisturbed are left out.
    """
    shares: dict[str, list[float]] = {}
    for reading, sample, yardstick in _timed(evidence):
        for name in reading.metered.values:
            shares.setdefault(name, []).append(_share(sample, yardstick))
    found = {name: together(each) for name, each in shares.items() if any(each)}
    return {name: None if bound > MOST else bound for name, bound in found.items()}


def _share(sample: HostSample, yardstick: Yardstick) -> float:
    marks = yardstick.marks(sample)
    if _UNBOUNDED.intersection(marks):
        return 1.0
    return yardstick.lost_share(sample) if marks else 0.0


def _timed(evidence: Sequence[Evidence]) -> Iterator[tuple[MeterReading, HostSample, Yardstick]]:
    for each in evidence:
        for reading in each.replicate.readings:
            if reading.during:
                yield reading, reading.during, each.selection.yardstick
