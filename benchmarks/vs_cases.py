"""What `vs_peers` measures: our stacks, the cases, and what each is to reach."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.layers import named
from benchmarks.peers import FP32, PEERS, Q4_0, Peer
from benchmarks.turns import Case, Stack
from benchmarks.vs_quality import WeightsAlone

OURS = (
    Stack("native_decode w4", named("native_decode")),
    Stack("native_decode w4, groups of 64", named("native_decode", group=64)),
    Stack("native_decode w4, groups of 128", named("native_decode", group=128)),
    Stack("native_decode w4, int8 cache", named("native_decode", kv="int8")),
    Stack("native_decode w8", named("native_decode", weights="w8")),
    Stack("native_decode bf16", named("native_decode", weights="bf16")),
)
"""Our stacks, the first with the technique's own defaults."""
IN_GOALS = OURS[1]
"""What the goals are about, of speed and of quality alike: the one that reads less than the default, and diverges more,
but still less than the peer's 4 bits. The default's own figures stand beside it."""
UNCALIBRATED = tuple(
    replace(stack, techniques=tuple(technique | {"calibration": "none"} for technique in stack.techniques))
    for stack in OURS
)
"""The same for the cases of speed, where weights are random: calibration takes time, and changes no bytes."""
ALONE = tuple(
    WeightsAlone(f"{stack.name}, float activations", stack.techniques) for stack in (OURS[0], OURS[4])
)
"""What of a divergence is the weights'; the rest is that of activations in int8 and of the cache."""
COMPILED = Stack("int4_weight_only + torch_compile", named("int4_weight_only", compiled=True))
"""The best that the stacks reach without an operator of a whole step."""

_SLOW = "left out at this size, where a request takes many seconds; the table of gpt2 has it"


@dataclass(frozen=True)
class Goal:
    """At least `least` times as fast as `against`; `aim` is what would be better still."""

    against: Peer
    least: float
    aim: float


@dataclass(frozen=True)
class Speed:
    """Subjects beside the first goal's peer, `at_once` of them together beside it: their memory must fit.

    Who is compared with a second peer stands in the same group with it, and so early in `subjects`. `left_out` are
    those that are only named, with the reason.
    """

    case: Case
    subjects: tuple[Stack | Peer, ...]
    goals: tuple[Goal, ...]
    at_once: int = 7
    left_out: dict[str, str] = field(default_factory=dict)


def _peers(*without: Peer) -> tuple[Peer, ...]:
    return tuple(peer for peer in PEERS if peer not in without)


_LARGE = tuple(peer for peer in PEERS if peer.loop == "llama_cpp_loop" or peer.weights == "bfloat16")

SPEED = {
    "decode-gpt2": Speed(
        Case("gpt2", 32, 64),
        (FP32, *UNCALIBRATED, COMPILED, *_peers(Q4_0, FP32)),
        (Goal(Q4_0, 2.0, 2.7), Goal(FP32, 15, 25)),
    ),
    "decode-llama-3.2-1b": Speed(
        Case("llama-3.2-1b", 32, 64),
        (UNCALIBRATED[0], UNCALIBRATED[1], UNCALIBRATED[4], *(peer for peer in _LARGE if peer != Q4_0)),
        (Goal(Q4_0, 1.35, 1.7),),
        at_once=3,
        left_out={peer.name: _SLOW for peer in PEERS if peer not in _LARGE},
    ),
    "prefill-gpt2": Speed(
        Case("gpt2", 128, 0, "prefill"),
        (*UNCALIBRATED, COMPILED, *_peers(Q4_0)),
        (Goal(Q4_0, 1.0, 1.5),),
    ),
}
"""The cases of speed by their names."""
QUALITY = "quality-tiny"
"""The case of quality."""


def speed_goals(name: str, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal of the case with its figure, or that there is none."""
    by_name = {line["name"]: line for line in lines}
    ours = by_name[IN_GOALS.name]
    return [_goal(name, goal, ours, by_name[goal.against.name]) for goal in SPEED[name].goals]


def quality_goal(lines: Sequence[dict[str, Any]], least: str, aim: str) -> dict[str, Any]:
    """The goals' stack at most at the divergence of the line `least`; better still, and the default's aim, `aim`'s."""
    found = {line["name"]: line.get("kld_mean") for line in lines}
    ours, default, theirs, better = (found.get(name) for name in (IN_GOALS.name, OURS[0].name, least, aim))
    what = f"quality-tiny: KLD of {IN_GOALS.name} at most {least}'s"
    if ours is None or theirs is None:
        return {"goal": f"{what}: not measured", "reached": False}
    text = f"{what}: {ours:.5f} against {theirs:.5f}"
    if better is not None and default is not None:
        said = (f"{_said(each <= better)} with {each:.5f}" for each in (ours, default))
        text += f" (aim {aim}'s {better:.5f}: {', the default '.join(said)})"
    return {"goal": text, "reached": ours <= theirs}


def _said(reached: bool) -> str:
    return "reached" if reached else "not reached"


def _goal(name: str, goal: Goal, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    what = f"{name}: {IN_GOALS.name} at least {goal.least:g}x {goal.against.name}"
    if not ours["rates"] or not theirs["rates"] or ours["group"] != theirs["group"]:
        return {"goal": f"{what}: not measured", "reached": False}
    ratio = median(own / other for own, other in zip(ours["rates"], theirs["rates"], strict=True))
    aim = f"aim {goal.aim:g}x: {_said(ratio >= goal.aim)}"
    return {"goal": f"{what}: {ratio:.2f}x ({aim})", "reached": ratio >= goal.least}
