"""Allocates bits to layers within a memory target: plain data and a greedy choice, without torch.

Every layer starts at its fewest bits. What the target leaves is spent in the order of `Stage`: each layer that still
fits is raised by one level, the later ones too where an earlier one was too large.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any


class Stage(IntEnum):
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
    """A layer with its levels, fewest bits first; of two in the rest the more sensitive to rounding is raised first.

    `gains`, where they are known, are how much less is lost with each level than with the one before, for each byte
    that it has more: then steps come in the order of these, whatever their levels.
    """

    path: str
    levels: tuple[Level, ...]
    stage: Stage
    sensitivity: float = 0.0
    gains: tuple[float, ...] = ()

    def turn(self, level: int) -> tuple[int, int, float]:
        """By which the step to this level is sorted."""
        if self.gains:
            return self.stage, 0, -min(self.gains[:level])  # never before the level below it
        return self.stage, level, -self.sensitivity


@dataclass(frozen=True)
class BitDecision:
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
    return sum(candidate.levels[0].stored_bytes for candidate in candidates)


def total_bytes(decisions: Iterable[BitDecision]) -> int:
    return sum(decision.level.stored_bytes for decision in decisions)


def decide(candidates: Sequence[Candidate], budget: int) -> list[BitDecision]:
    """One decision for each candidate, of at most `budget` bytes together; all at the fewest bits where that is too
    little."""
    chosen = dict.fromkeys((candidate.path for candidate in candidates), 0)
    left = budget - least_bytes(candidates)
    for candidate, level, more in _steps(candidates):
        if chosen[candidate.path] == level - 1 and more <= left:
            chosen[candidate.path] = level
            left -= more
    decisions = []
    for candidate in candidates:
        level = chosen[candidate.path]
        not_raised = _NO_ROOM if len(candidate.levels) > 1 else _NO_MORE_BITS
        reason = _RAISED[candidate.stage] if level else not_raised
        decisions.append(BitDecision(candidate.path, candidate.levels[level], reason))
    return decisions


def bytes_that_save(candidates: Sequence[Candidate], loss: float) -> tuple[int, float]:
    """The least bytes with which `decide` saves at least so much loss, and how much it saves then.

    Every candidate with more than one level has `gains`. Where all steps that gain something save less, these.
    """
    size, saved = least_bytes(candidates), 0.0
    for candidate, level, more in _steps(candidates):
        if saved >= loss or min(candidate.gains[:level]) <= 0:
            break
        size += more
        saved += candidate.gains[level - 1] * more
    return size, saved


def _steps(candidates: Sequence[Candidate]) -> list[tuple[Candidate, int, int]]:
    """Each candidate's level above its first with the bytes that it adds, in the order in which levels are raised."""
    steps = [
        (candidate, level, upper.stored_bytes - lower.stored_bytes)
        for candidate in candidates
        for level, (lower, upper) in enumerate(pairwise(candidate.levels), 1)
    ]
    return sorted(steps, key=lambda step: step[0].turn(step[1]))


def table(decisions: Sequence[BitDecision]) -> list[dict[str, Any]]:
    """The decisions as small JSON: blocks that were decided alike share a row, their numbers are joined ("h.1-11")."""
    rows: dict[tuple[str, str, int, str], list[BitDecision]] = {}
    for decision in decisions:
        anywhere = _BLOCK.sub(".#", decision.path, count=1)
        key = (anywhere, decision.level.kind, decision.level.bits, decision.reason)
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


_BLOCK = re.compile(r"\.(\d+)(?=\.)")


def _joined(paths: Sequence[str]) -> str:
    """One name for layers that differ in the number of their block alone: h.0.mlp, h.2.mlp, h.3.mlp are h.0,2-3.mlp."""
    numbers = sorted(int(match[1]) for match in map(_BLOCK.search, paths) if match)
    if len(numbers) < 2:
        return paths[0]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    shown = ",".join("-".join(map(str, ends)) for ends in ranges)
    return _BLOCK.sub(f".{shown}", paths[0], count=1)
