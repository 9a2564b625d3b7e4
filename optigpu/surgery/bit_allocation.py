"""Allocates bits to layers within a memory target: plain data and a greedy choice, without torch.

Every layer starts at the fewest bits that are asked for. What the target leaves is spent in the order of `Stage`: each
layer that still fits is raised by one level, the later ones too where an earlier one was too large.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Stage(IntEnum):
    """The order in which additional bits are allocated."""

    HEAD = 1
    FIRST_BLOCK = 2
    REST = 3


@dataclass(frozen=True)
class Level:
    """One way to store a layer's weights, with its bytes including scales and padding."""

    kind: str
    bits: int
    stored_bytes: int


@dataclass(frozen=True)
class Candidate:
    """A layer with its possible levels. `levels` go from the fewest bits to the most.

    `sensitivity` says how much rounding costs it; of two in the rest, the more sensitive is raised first.
    """

    path: str
    levels: tuple[Level, ...]
    stage: Stage
    sensitivity: float = 0.0


@dataclass(frozen=True)
class BitDecision:
    """The level that a layer gets, and the reason."""

    path: str
    level: Level
    reason: str


_RAISED = {
    Stage.HEAD: "head and embedding come first after the fewest bits",
    Stage.FIRST_BLOCK: "the first block is kept in more bits",
    Stage.REST: "the target leaves room, and rounding costs it more than those without",
}
_NO_ROOM = "the target leaves no room for more"
_NO_MORE_BITS = "more bits than this are not offered"


def least_bytes(candidates: Iterable[Candidate]) -> int:
    """Bytes when every layer has the fewest bits."""
    return sum(candidate.levels[0].stored_bytes for candidate in candidates)


def total_bytes(decisions: Iterable[BitDecision]) -> int:
    """Bytes of all decisions together."""
    return sum(decision.level.stored_bytes for decision in decisions)


def decide(candidates: Sequence[Candidate], budget: int) -> list[BitDecision]:
    """One decision for each candidate, in their order; together at most `budget` bytes where that is enough for all at
    their fewest bits, else all at those.
    """
    chosen = dict.fromkeys((candidate.path for candidate in candidates), 0)
    left = budget - least_bytes(candidates)
    for candidate, level in _raises(candidates):
        more = candidate.levels[level].stored_bytes - candidate.levels[level - 1].stored_bytes
        if chosen[candidate.path] == level - 1 and more <= left:
            chosen[candidate.path] = level
            left -= more
    return [_decision(candidate, chosen[candidate.path]) for candidate in candidates]


def table(decisions: Sequence[BitDecision]) -> list[dict[str, Any]]:
    """The decisions as small JSON: blocks that were decided alike share a row, their numbers are joined ("h.1-11")."""
    rows: dict[tuple[str, str, int, str], list[BitDecision]] = {}
    for decision in decisions:
        key = (_without_block(decision.path), decision.level.kind, decision.level.bits, decision.reason)
        rows.setdefault(key, []).append(decision)
    return [
        {
            "layer": _joined([decision.path for decision in alike]),
            "layers": len(alike),
            "kind": kind,
            "bits": bits,
            "bytes": sum(decision.level.stored_bytes for decision in alike),
            "reason": reason,
        }
        for (_, kind, bits, reason), alike in rows.items()
    ]


def _raises(candidates: Sequence[Candidate]) -> list[tuple[Candidate, int]]:
    """Every step from one level to the next, the most useful first."""
    steps = [(candidate, level) for candidate in candidates for level in range(1, len(candidate.levels))]
    return sorted(steps, key=lambda step: (step[0].stage, step[1], -step[0].sensitivity))


def _decision(candidate: Candidate, level: int) -> BitDecision:
    not_raised = _NO_ROOM if len(candidate.levels) > 1 else _NO_MORE_BITS
    reason = _RAISED[candidate.stage] if level else not_raised
    return BitDecision(candidate.path, candidate.levels[level], reason)


_BLOCK = re.compile(r"\.(\d+)(?=\.)")


def _without_block(path: str) -> str:
    return _BLOCK.sub(".#", path, count=1)


def _joined(paths: Sequence[str]) -> str:
    """One name for layers that differ in the number of their block alone."""
    found = [_BLOCK.search(path) for path in paths]
    numbers = [int(match[1]) for match in found if match]
    if len(numbers) < 2:
        return paths[0]
    return _BLOCK.sub(f".{_ranges(numbers)}", paths[0], count=1)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 2, 3, 4] as "0,2-4"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(str(end) for end in part) for part in parts)
