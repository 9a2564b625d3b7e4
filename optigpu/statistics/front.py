"""Which of several points no other surpasses. Intervals that overlap count as equal, and so does what is not known."""

from collections.abc import Sequence

Bounds = tuple[float, float] | None
"""What a point is in one objective, from its lowest to its highest value; more is better. None: not known."""


def unsurpassed(points: Sequence[Sequence[Bounds]]) -> list[int]:
    """The numbers of the points that no other surpasses; every point has the same objectives in the same order."""
    return [
        number
        for number, point in enumerate(points)
        if not any(surpasses(other, point) for place, other in enumerate(points) if place != number)
    ]


def surpasses(one: Sequence[Bounds], other: Sequence[Bounds]) -> bool:
    """Whether the first is as good in every objective and better in one."""
    signs = [compared(ours, theirs) for ours, theirs in zip(one, other, strict=True)]
    return all(sign >= 0 for sign in signs) and any(sign > 0 for sign in signs)


def compared(one: Bounds, other: Bounds) -> int:
    """1 where the first is better, -1 where the second is, 0 where that is not known."""
    if one is None or other is None:
        return 0
    (low, high), (other_low, other_high) = one, other
    return int(low > other_high) - int(high < other_low)
