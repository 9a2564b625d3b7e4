"""What disturbed a result from outside: what it can have cost, and whether that is a reason or only a mark.

A disturbance is a reason only where what it can have cost is more than `RANKED_UP_TO`, or has no bound. Below that the
warning `disturbed` says what it was, and the intervals reach as far as it can have cost. What one finding explains is
no second one. Meters that time requests have disturbances and bounds of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from optigpu.conductor.processes.rounds import MeterReading
from optigpu.conductor.verdicts import contradictions, disturbance
from optigpu.conductor.verdicts.cost import MOST, RANKED_UP_TO, Evidence, bound_of, together
from optigpu.conductor.verdicts.disturbance import Disturbance, Yardstick
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.documents.result import VerdictReason
from optigpu.documents.rounds import RoundMark

REASON_LEAST_S = 0.25
"""Less lost time, over all replicates, is no reason: the kernel's ticks are a large share of it."""

Detector = Callable[[Evidence], Disturbance | None]


@dataclass(frozen=True)
class Outside:
    """What disturbed a result: reasons with their notes, sentences for a mark, and what all can have cost at most."""

    reasons: dict[VerdictReason, str]
    marks: tuple[str, ...]
    # The share of the figures' speed; None: it has no bound.
    bound: float | None
    says_stolen: bool = False


def from_outside(primary: str, evidence: Sequence[Evidence]) -> Outside:
    """All that the counters, the probe and the samples show, each cause once."""
    unbounded = {
        VerdictReason.THROTTLED: first(lambda each: disturbance.hot(each.samples), evidence),
        VerdictReason.FOREIGN_PROCESS: first(lambda each: disturbance.foreign_on_gpu(each.samples), evidence),
        VerdictReason.INTERRUPTED: first(lambda each: disturbance.suspended(each.samples), evidence),
    }
    reasons = {reason: note for reason, note in unbounded.items() if note}
    causes = _causes(evidence)
    bound = bound_of(primary, evidence)
    # Whether the counters show more lost time than a ranked result may have. The probe alone is no proof.
    lost_s = sum(each.lost.total_s for each in evidence if each.is_disturbed)
    counted = together([each.counted_bound(primary) for each in evidence])
    if lost_s > REASON_LEAST_S and counted > RANKED_UP_TO:
        for reason, notes in _blamed(evidence, causes).items():
            reasons[reason] = " ".join(filter(None, (reasons.get(reason), *notes)))
        marks: tuple[str, ...] = ()
    else:
        marks = tuple(dict.fromkeys(causes.values()))
    own, own_marks, own_bound = _own(primary, evidence, blamed=bool(reasons))
    reasons |= {reason: note for reason, note in own.items() if reason not in reasons}
    whole = 1 - (1 - bound) * (1 - own_bound)
    is_bounded = not any(unbounded.values()) and not (reasons and whole > MOST)
    return Outside(
        reasons=reasons,
        marks=(*marks, *own_marks),
        bound=min(whole, MOST) if is_bounded else None,
        says_stolen=RoundMark.STEAL in causes,
    )


def first(detector: Detector, evidence: Sequence[Evidence]) -> str | None:
    """A detector's first finding, with the other replicates in which it found something."""
    found = {each.number: finding for each in evidence if (finding := detector(each))}
    if not found:
        return None
    number, *others = found
    also = f" (and during {numbered(others)})" if others else ""
    return found[number].sentence(f"during {numbered([number])}{also}")


def numbered(numbers: Sequence[int]) -> str:
    """For example "replicate 1", or "replicates 1, 2 and 4"."""
    *before, last = map(str, numbers)
    return f"replicates {', '.join(before)} and {last}" if before else f"replicate {last}"


def _causes(evidence: Sequence[Evidence]) -> dict[RoundMark, str]:
    """What disturbed the rounds that figures come from, each with its sentence."""
    disturbed = [each for each in evidence if each.is_disturbed]

    def others(each: Evidence) -> Disturbance | None:
        if each.shows(RoundMark.OTHERS, each.lost.others_s):
            return disturbance.foreign(each.samples, each.selection.yardstick)
        return each.crowded  # where that is little, one of them never rested

    def stolen(each: Evidence) -> Disturbance | None:
        is_shown = each.shows(RoundMark.STEAL, each.lost.stolen_s)
        return disturbance.stolen(each.samples, least=0.0) if is_shown else None

    def slow_probe(each: Evidence) -> Disturbance | None:
        is_shown = each.has(RoundMark.SLOW_PROBE)
        return disturbance.slow_probe(each.samples, each.selection.yardstick) if is_shown else None

    detectors: dict[RoundMark, Detector] = {
        RoundMark.OTHERS: others,
        RoundMark.STEAL: stolen,
        RoundMark.QUOTA: lambda each: disturbance.quota(each.samples),
        RoundMark.HEAT: lambda each: disturbance.gpu_heat(each.samples),
        RoundMark.SLOW_PROBE: slow_probe,
        RoundMark.UNCOUNTED: lambda each: disturbance.uncounted(each.samples),
    }
    found = {mark: first(detector, disturbed) for mark, detector in detectors.items()}
    return {mark: sentence for mark, sentence in found.items() if sentence}


def _blamed(evidence: Sequence[Evidence], causes: dict[RoundMark, str]) -> dict[VerdictReason, list[str]]:
    """The causes by their reason: the greater one, and the other if it alone were half of what is too much."""
    wall_s = sum(each.wall_s for each in evidence)
    foreign_s = sum(each.lost.others_s + each.lost.stolen_s for each in evidence)
    slowed_s = sum(each.lost.quota_s + each.lost.heat_s for each in evidence)
    least_s = min(max(foreign_s, slowed_s), RANKED_UP_TO / 2 * wall_s)
    by_reason = {
        VerdictReason.THROTTLED: (slowed_s, (RoundMark.QUOTA, RoundMark.HEAT)),
        VerdictReason.FOREIGN_PROCESS: (foreign_s, (RoundMark.OTHERS, RoundMark.STEAL)),
    }
    return {
        reason: [causes[mark] for mark in marks if mark in causes]
        for reason, (lost_s, marks) in by_reason.items()
        if lost_s >= least_s
    }


def _own(
    primary: str, evidence: Sequence[Evidence], *, blamed: bool
) -> tuple[dict[VerdictReason, str], tuple[str, ...], float]:
    """What the samples themselves show, where no reason explains it: reasons, marks, and what it can have cost."""
    if blamed:
        return {}, (), 0.0
    stops = {each.number: stop for each in evidence if (stop := contradictions.stop(each))}
    nothing = None, 0.0
    stopped = first(lambda each: stops.get(each.number, nothing)[0], evidence)
    costs = [stops.get(each.number, nothing)[1] for each in evidence]
    drift = contradictions.drifted(primary, evidence)
    found = [(VerdictReason.INTERRUPTED, stopped, together(costs))] if stopped else []
    if drift:
        change = (
            f"Requests became {'slower' if drift.change > 0 else 'faster'} while they were timed: the last third took "
            f"{1 + drift.change:.2f} times as long as the first; let the machine settle and measure again."
        )
        found.append((VerdictReason.DRIFT, change, drift.share))
    reasons = {reason: note for reason, note, share in found if share > RANKED_UP_TO}
    marks = tuple(note for _, note, share in found if share <= RANKED_UP_TO)
    return reasons, marks, max([drift.cost if drift else 0.0, *(share for _, _, share in found)])


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


def disturbed_readings(evidence: Sequence[Evidence]) -> str | None:
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
    known = [bound for bound in bounds_of_readings(evidence).values() if bound is not None]
    cost = f"This can have cost up to {100 * max(known):.0f}%." if known else "What this cost is not known."
    return f"{' '.join(said.values())} {cost}"


def bounds_of_readings(evidence: Sequence[Evidence]) -> dict[str, float | None]:
    """For each metric of such a meter, the share of it that disturbances can have cost at most: None where that is not
    known, and nothing where all readings were undisturbed."""
    shares: dict[str, list[float]] = {}
    for reading, sample, yardstick in _timed(evidence):
        marks = yardstick.marks(sample)
        lost = yardstick.lost_share(sample) if marks else 0.0
        for name in reading.metered.values:
            shares.setdefault(name, []).append(1.0 if _UNBOUNDED.intersection(marks) else lost)
    found = {name: together(each) for name, each in shares.items() if any(each)}
    return {name: None if bound > MOST else bound for name, bound in found.items()}


def _timed(evidence: Sequence[Evidence]) -> Iterator[tuple[MeterReading, HostSample, Yardstick]]:
    for each in evidence:
        for reading in each.replicate.readings:
            if reading.during:
                yield reading, reading.during, each.selection.yardstick
