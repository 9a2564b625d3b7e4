"""Which of several points no other surpasses. Intervals that overlap count as equal, and so does what is not known."""

from collections.abc import Sequence

Bounds = tuple[float, float] | None
"""What a point is in one objective, from its lowest to its highest value; more is better. None: not known."""


def unsurpassed(points: Sequence[Sequence[Bounds]]) -> list[int]:
    """The numbers of the points that no other surpasses; every point has the same objectives in the same order."""
    others, found = list(points), []
    for number, point in enumerate(points):
        winner = next((place for place, other in enumerate(others) if surpasses(other, point)), None)
        if winner is None:
            found.append(number)
        else:  # what surpasses one point is likely to surpass the next ones
            others.insert(0, others.pop(winner))
    return found


def surpasses(one: Sequence[Bounds], other: Sequence[Bounds]) -> bool:
    """Whether the first is as good in every objective and better in one."""
    better = False
    for ours, theirs in zip(one, other, strict=True):
        sign = compared(ours, theirs)
        if sign < 0:
            return False
        better = better or sign > 0
    return better


def compared(one: Bounds, other: Bounds) -> int:
    """1 where the first is better, -1 where the second is, 0 where that is not known."""
    if one is None or other is None:
        return 0
    (low, high), (other_low, other_high) = one, other
    return int(low > other_high) - int(high < other_low)
