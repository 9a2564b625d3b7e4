"""Which entries no other of the same board and hardware beats in speed, memory, quality and energy.

The flags are kept up to date when an entry becomes the current one of its place or ceases to be, so that reading them
costs nothing. An entry beats another if it is as good in all four and better in one. What was not measured counts as
the worst, so a result without quality or energy beats none that has it; without speed or memory nothing is weighed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from optigpu.documents.views import Standing
from optigpu.store.tables import LeaderboardEntry
from optigpu.vocabulary import DeviceKind

Costs = tuple[float, float, float, float]
"""Less is better: the negated speed, bytes, Kullback-Leibler divergence, joules."""


class Group(NamedTuple):
    """Entries that are weighed against each other."""

    board: int
    hardware_class: str
    device: DeviceKind


class Weighed(NamedTuple):
    """An entry of a group."""

    result_id: str
    costs: Costs


def group_of(entry: LeaderboardEntry) -> Group:
    return Group(entry.board, entry.hardware_class, entry.device)


def costs_of(entry: LeaderboardEntry) -> Costs | None:
    """None if its speed or its memory is unknown."""
    return _costs(entry.score, entry.size_bytes, entry.kld, entry.energy_j)


def beats(one: Costs, other: Costs) -> bool:
    """Whether the first is as good in everything, and better in something."""
    return one != other and all(mine <= yours for mine, yours in zip(one, other, strict=True))


def came(session: Session, entry: LeaderboardEntry) -> None:
    """The entry is the current one of its place now. The caller holds the board."""
    costs = costs_of(entry)
    if costs is None:
        entry.pareto = None
        return
    front = _members(session, group_of(entry), on_front=True)
    entry.pareto = not any(beats(other.costs, costs) for other in front)
    if entry.pareto:
        _flag(session, [other.result_id for other in front if beats(costs, other.costs)], on_front=False)


def went(session: Session, group: Group, costs: Costs | None, *, was_on_front: bool) -> None:
    """An entry of these costs is no current one any more. The caller holds the board, and has cleared its flag."""
    if costs is None or not was_on_front:
        return
    beaten = [each for each in _members(session, group, on_front=False) if beats(costs, each.costs)]
    front = [each.costs for each in _members(session, group, on_front=True)]
    free: list[str] = []
    for each in sorted(beaten, key=lambda weighed: weighed.costs):  # none is beaten by one that follows it
        if not any(beats(other, each.costs) for other in front):
            front.append(each.costs)
            free.append(each.result_id)
    _flag(session, free, on_front=True)


def _members(session: Session, group: Group, *, on_front: bool) -> list[Weighed]:
    entry = LeaderboardEntry
    query = select(entry.result_id, entry.score, entry.size_bytes, entry.kld, entry.energy_j).where(
        entry.board == group.board,
        entry.hardware_class == group.hardware_class,
        entry.device == group.device,
        entry.pareto == on_front,
        entry.standing == Standing.CURRENT,
    )
    found = ((row[0], _costs(*row[1:])) for row in session.execute(query))
    return [Weighed(result_id, costs) for result_id, costs in found if costs is not None]


def _costs(
    score: float | None, size_bytes: float | None, kld: float | None, energy_j: float | None
) -> Costs | None:
    if score is None or size_bytes is None:
        return None
    return -score, size_bytes, math.inf if kld is None else kld, math.inf if energy_j is None else energy_j


def _flag(session: Session, result_ids: Sequence[str], *, on_front: bool) -> None:
    if result_ids:
        of_these = LeaderboardEntry.result_id.in_(result_ids)
        session.execute(update(LeaderboardEntry).where(of_these).values(pareto=on_front))
