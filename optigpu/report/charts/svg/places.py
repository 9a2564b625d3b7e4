"""Where labels of points stand, so that none lies on another, on a point or outside of the plot."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NEAR, FAR = 8.0, 16.0
"""How far labels stand from their points."""


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def met(self, others: Sequence["Box"]) -> list["Box"]:
        """Those of the others that lie on it."""
        left, top, right, bottom = self.left, self.top, self.right, self.bottom
        return [
            each
            for each in others
            if left < each.right and each.left < right and top < each.bottom and each.top < bottom
        ]

    def meets_any(self, others: Sequence["Box"]) -> bool:
        """Whether one of the others lies on it."""
        left, top, right, bottom = self.left, self.top, self.right, self.bottom
        for each in others:
            if left < each.right and each.left < right and top < each.bottom and each.top < bottom:
                return True
        return False

    def holds(self, other: "Box") -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def common(self, other: "Box") -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)


@dataclass(frozen=True)
class Wanted:
    """A label of a point: where the point is, and the size of the label."""

    x: float
    y: float
    width: float
    height: float


def around(x: float, y: float, radius: float) -> Box:
    return Box(x - radius, y - radius, x + radius, y + radius)


def placed(
    wanted: Sequence[Wanted], page: Box, solid: Sequence[Box], soft: Sequence[Box]
) -> list[Box | None]:
    """A place for each label, in their order; None where there is none left.

    Labels lie on no `solid` box, and on `soft` ones as little as they can.
    """
    taken = list(solid)
    found: list[Box | None] = []
    for each in wanted:
        place = _place(each, page, taken, soft)
        found.append(place)
        if place:
            taken.append(place)
    return found


def _place(each: Wanted, page: Box, taken: Sequence[Box], soft: Sequence[Box]) -> Box | None:
    """The best place of a label: one that is further off has to cover less for it."""
    wide, high = FAR + each.width, FAR + each.height
    reach = Box(each.x - wide, each.y - high, each.x + wide, each.y + high)
    taken, soft = reach.met(taken), reach.met(soft)
    best, least = None, math.inf
    for rank, place in enumerate(_candidates(each)):
        if 2.0 * rank >= least:
            break
        if page.holds(place) and not place.meets_any(taken):
            cost = sum(map(place.common, place.met(soft))) + 2.0 * rank
            if cost < least:
                best, least = place, cost
    return best


def _candidates(each: Wanted) -> Iterator[Box]:
    """Right, left, above, below and between, close to the point and then further off."""
    wide, high = each.width, each.height
    for gap in (NEAR, FAR):
        near = gap * 0.6
        corners = (
            (each.x + gap, each.y - high / 2),
            (each.x - gap - wide, each.y - high / 2),
            (each.x + near, each.y - near - high),
            (each.x - near - wide, each.y - near - high),
            (each.x + near, each.y + near),
            (each.x - near - wide, each.y + near),
            (each.x - wide / 2, each.y - gap - high),
            (each.x - wide / 2, each.y + gap),
        )
        for left, top in corners:
            yield Box(left, top, left + wide, top + high)
