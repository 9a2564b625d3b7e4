"""What disturbed a result from outside: what it can have cost, and whether that is a reason or only a mark.

A disturbance is a reason only where what it can have cost is more than `RANKED_UP_TO`, or has no bound. Below that the
warning `disturbed` says what it was, and the intervals reach as far as it can have cost. What one finding explains is
no second one: a request that stood still, or a speed that changed, while others used the machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optigpu.conductor.verdicts import detectors, disturbance
from optigpu.conductor.verdicts.cost import MOST, RANKED_UP_TO, Evidence, bound_of, together
from optigpu.conductor.verdicts.disturbance import Disturbance
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
    if _is_too_much(primary, evidence):
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
    detectors: dict[RoundMark, Detector] = {
        RoundMark.OTHERS: _others,
        RoundMark.STEAL: _stolen,
        RoundMark.QUOTA: lambda each: disturbance.quota(each.samples),
        RoundMark.HEAT: lambda each: disturbance.gpu_heat(each.samples),
        RoundMark.SLOW_PROBE: _slow_probe,
        RoundMark.UNCOUNTED: lambda each: disturbance.uncounted(each.samples),
    }
    found = {mark: first(detector, disturbed) for mark, detector in detectors.items()}
    return {mark: sentence for mark, sentence in found.items() if sentence}


def _others(each: Evidence) -> Disturbance | None:
    """How much they used; where that is little, that one of them never rested."""
    if each.shows(RoundMark.OTHERS, each.lost.others_s):
        return disturbance.foreign(each.samples, each.selection.yardstick)
    return each.crowded


def _stolen(each: Evidence) -> Disturbance | None:
    is_shown = each.shows(RoundMark.STEAL, each.lost.stolen_s)
    return disturbance.stolen(each.samples, least=0.0) if is_shown else None


def _slow_probe(each: Evidence) -> Disturbance | None:
    is_shown = each.has(RoundMark.SLOW_PROBE)
    return disturbance.slow_probe(each.samples, each.selection.yardstick) if is_shown else None


def _is_too_much(primary: str, evidence: Sequence[Evidence]) -> bool:
    """Whether the counters show more lost time than a ranked result may have. The probe alone is no proof."""
    lost_s = sum(each.lost.total_s for each in evidence if each.is_disturbed)
    return (
        lost_s > REASON_LEAST_S
        and together([each.counted_bound(primary) for each in evidence]) > RANKED_UP_TO
    )


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
    stops = {each.number: stop for each in evidence if (stop := detectors.stop(each))}
    stopped = first(lambda each: stops[each.number].disturbance if each.number in stops else None, evidence)
    costs = [stops[each.number].cost if each.number in stops else 0.0 for each in evidence]
    drift = detectors.drifted(primary, evidence)
    found = [(VerdictReason.INTERRUPTED, stopped, together(costs))] if stopped else []
    found += [(VerdictReason.DRIFT, _changed(drift.change), drift.share)] if drift else []
    reasons = {reason: note for reason, note, share in found if share > RANKED_UP_TO}
    marks = tuple(note for _, note, share in found if share <= RANKED_UP_TO)
    return reasons, marks, max([drift.cost if drift else 0.0, *(share for _, _, share in found)])


def _changed(change: float) -> str:
    slower = "slower" if change > 0 else "faster"
    return (
        f"Requests became {slower} while they were timed: the last third took {1 + change:.2f} times as long as the "
        "first; let the machine settle and measure again."
    )
