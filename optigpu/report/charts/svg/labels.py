"""Where labels of points find room: close to their points, on nothing that must be seen."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NEAR, FAR = 8.0, 16.0
"""How far labels stand from their points."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def met(self, others: Sequence["Box"]) -> list["Box"]:
        """Those of the others that lie on it."""
        left, top, right, bottom = self
        return [
            each
            for each in others
            if left < each.right and each.left < right and top < each.bottom and each.top < bottom
        ]

    def meets_any(self, others: Sequence["Box"]) -> bool:
        """Whether one of the others lies on it."""
        return bool(self.met(others))

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


class Wanted(NamedTuple):
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
    """A place for each label, in their order; None where there is none left. Labels lie on no `solid` box, and on
    `soft` ones as little as they can."""
    taken, found = list(solid), []
    for each in wanted:
        place = _place(each, page, taken, soft)
        found.append(place)
        taken += [place] if place else []
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
    x, y, wide, high = each
    for gap in (NEAR, FAR):
        near = gap * 0.6
        corners = (
            (x + gap, y - high / 2),
            (x - gap - wide, y - high / 2),
            (x + near, y - near - high),
            (x - near - wide, y - near - high),
            (x + near, y + near),
            (x - near - wide, y + near),
            (x - wide / 2, y - gap - high),
            (x - wide / 2, y + gap),
        )
        yield from (Box(left, top, left + wide, top + high) for left, top in corners)
