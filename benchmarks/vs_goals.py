"""The goals of `vs_peers`, fixed before a run: how many times as fast as whom, and which peers count.

A peer counts if its divergence on the trained model of the same architecture is at most that of ours and a tenth. A
ratio is one of pairs of processes of the same job, by their turns, or by their medians where turns do not say. What a
goal needs and the run has not makes it "not measured", and what is not valid reaches no goal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.stacks import Q4_0, Q4_0_HEAD, Stack
from benchmarks.vs_cases import IN_GOALS, NOT_PEERS
from optigpu.documents.result import VerdictReason
from optigpu.statistics.intervals import paired_ratio
from optigpu.vocabulary import Document

Line = Document


@dataclass(frozen=True)
class Goal:
    """At least `least` times as fast as `against`; without it, as the best of the peers that count."""

    least: float
    against: Stack | None = None


GOALS = {
    "decode-gpt2": (Goal(2.7, Q4_0), Goal(1.6)),
    "decode-llama-3.2-1b": (Goal(2.0, Q4_0), Goal(1.6)),
    "prefill-gpt2": (Goal(1.8, Q4_0), Goal(1.3)),
    "prefill-llama-3.2-1b": (Goal(1.8, Q4_0), Goal(1.3)),
}
"""By the cases' names; the cases of models that people use have none yet."""
MOST_ABOVE = 0.1
"""How far above ours the divergence of a peer that counts may be, as a share of ours."""
SHOWN = {Q4_0.name: Q4_0_HEAD.name}
"""Whose ratio stands beside that of a goal's own peer, and decides nothing."""
RATED = frozenset({VerdictReason.OUTPUT_INVALID})
"""Reasons that leave a peer's rate what it is: it stays in the comparison, where it can only deny a goal."""
NOT_OURS = "ours was not measured beside it"


@dataclass(frozen=True)
class Over:
    """How many times as fast as the peer of `line` ours is, and that with its interval."""

    line: Line
    ratio: float
    text: str

    @property
    def name(self) -> str:
        """The peer's."""
        return str(self.line["name"])


def counting(quality: Sequence[Line]) -> frozenset[str] | None:
    """The names of the peers that count, of the lines of a case of quality; None if ours is not among them."""
    found = {line["name"]: line["kld_mean"] for line in quality if line.get("kld_mean") is not None}
    ours = found.get(IN_GOALS.name)
    if ours is None:
        return None
    return frozenset(
        name for name, each in found.items() if name not in NOT_PEERS and each <= (1 + MOST_ABOVE) * ours
    )


def speed_goals(name: str, lines: Sequence[Line], quality: Sequence[Line]) -> list[dict[str, Any]]:
    """Each goal of the case with its figure, or a note that it was not measured."""
    return [
        _over_best(name, goal, lines, counting(quality))
        if goal.against is None
        else _over_one(name, goal, goal.against, {line["name"]: line for line in lines})
        for goal in GOALS.get(name, ())
    ]


def quality_goal(name: str, lines: Sequence[Line]) -> dict[str, Any]:
    """The goals' stack at most at the divergence of llama.cpp Q4_0, which it is compared with."""
    found = {line["name"]: line.get("kld_mean") for line in lines}
    ours, theirs = found.get(IN_GOALS.name), found.get(Q4_0.name)
    what = f"{name}: KLD of {IN_GOALS.name} at most {Q4_0.name}'s"
    if ours is None or theirs is None:
        return _not_measured(what)
    return {"goal": f"{what}: {ours:.5f} against {theirs:.5f}", "reached": ours <= theirs}


def _over_one(name: str, goal: Goal, against: Stack, lines: dict[str, Line]) -> dict[str, Any]:
    what = f"{name}: {IN_GOALS.name} at least {goal.least:g}x {against.name}"
    found = _over(lines[against.name])
    if found is None:
        return _not_measured(what, lines[against.name]["reason"] or NOT_OURS)
    beside = _over(lines[SHOWN[against.name]])
    told = [found.text, f"{SHOWN[against.name]}: {beside.text if beside else 'not measured'}"]
    wrong = _wrong(found.line["ours_verdict"], IN_GOALS.name) + _wrong(found.line["verdict"], found.name)
    return _ended(what, told, wrong, found.ratio >= goal.least)


def _over_best(name: str, goal: Goal, lines: Sequence[Line], names: frozenset[str] | None) -> dict[str, Any]:
    """The best is that beside which ours is the least faster."""
    what = f"{name}: {IN_GOALS.name} at least {goal.least:g}x the best of the peers that count"
    if names is None:
        return _not_measured(what, "the run has no divergence of ours")
    count = [line for line in lines if line["name"] in names]
    measured = [found for line in count if (found := _over(line))]
    absent = [line for line in count if not _over(line) and not line["left_out"]]
    if not measured or absent:
        return _not_measured(what, *(f"{line['name']}: {line['reason'] or NOT_OURS}" for line in absent))
    best = min(measured, key=lambda over: over.ratio)
    told = [f"{_named(best)}, of {len(measured)}"]
    fastest = min(
        (found for line in lines if _is_peer(line) and (found := _over(line))), key=lambda over: over.ratio
    )
    told += [f"{_named(fastest)}, which does not count"] if fastest.ratio < best.ratio else []
    left_out = [line["name"] for line in count if line["left_out"]]
    told += [f"left out: {', '.join(left_out)}"] if left_out else []
    wrong = _wrong(best.line["ours_verdict"], IN_GOALS.name)
    for over in measured:
        wrong += _wrong([reason for reason in over.line["verdict"] if reason not in RATED], over.name)
    return _ended(what, told, wrong, best.ratio >= goal.least)


def _over(line: Line) -> Over | None:
    """None where the peer, or ours beside it, was not measured."""
    if not line["rates"] or not line["ours"]:
        return None
    ours, theirs = (tuple((rate,) for rate in line[side]) for side in ("ours", "rates"))
    ratio, bounds = paired_ratio(ours, theirs, line.get("ours_over", ()))
    return Over(line, ratio, f"{ratio:.2f}x" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else ""))


def _named(over: Over) -> str:
    """With what is wrong with the peer's result."""
    wrong = ", ".join(over.line["verdict"])
    return f"{over.text} {over.name}" + (f" (not valid: {wrong})" if wrong else "")


def _is_peer(line: Line) -> bool:
    return line["name"] not in NOT_PEERS


def _wrong(verdict: Sequence[str], name: str) -> list[str]:
    return [f"{name}: {', '.join(verdict)}"] if verdict else []


def _ended(what: str, told: Sequence[str], wrong: Sequence[str], reached: bool) -> dict[str, Any]:
    not_valid = f"; not valid ({'; '.join(wrong)})" if wrong else ""
    return {"goal": f"{what}: {'; '.join(told)}{not_valid}", "reached": reached and not wrong}


def _not_measured(what: str, *reasons: str) -> dict[str, Any]:
    why = "; ".join(reasons)
    return {"goal": f"{what}: not measured" + (f" ({why})" if why else ""), "reached": False}
