"""Where labels of points stand, so that none lies on another, on a point or outside of the plot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

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
        free = [
            (sum(place.common(box) for box in soft) + 2.0 * rank, rank, place)
            for rank, place in enumerate(_candidates(each))
            if page.holds(place) and not any(place.meets(box) for box in taken)
        ]
        best = min(free, default=None, key=lambda one: one[:2])
        found.append(best[2] if best else None)
        if best:
            taken.append(best[2])
    return found


def _candidates(each: Wanted) -> Iterator[Box]:
    """Right, left, above, below and between, close to the point and then further off."""
    wide, high = each.width, each.height
    for gap in (8.0, 16.0):
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
