"""The cases of `vs_peers`: stacks, workloads and goals."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import peers
from benchmarks.peers import Peer
from benchmarks.stacks import LLAMA_CPP, Q4_0, Case, Stack, named
from benchmarks.vs_quality import WeightsAlone
from optigpu.statistics.intervals import paired_ratio

OURS = (
    Stack("native_decode w4", named("native_decode")),
    Stack("native_decode w4, groups of 64", named("native_decode", group=64)),
    Stack("native_decode w4, groups of 128", named("native_decode", group=128)),
    Stack("native_decode w4, int8 cache", named("native_decode", kv="int8")),
    Stack("native_decode w4k", named("native_decode", weights="w4k")),
    Stack("native_decode w4k, groups of 64", named("native_decode", weights="w4k", group=64)),
    Stack("native_decode w8", named("native_decode", weights="w8")),
    Stack("native_decode bf16", named("native_decode", weights="bf16")),
)
"""Our stacks, the first with the technique's own defaults."""
IN_GOALS = OURS[1]
"""What the goals are about, of speed and of quality alike: the one that reads less than the default, and diverges more,
but still less than the peer's 4 bits. The default's own figures are shown beside it."""
UNCALIBRATED = tuple(
    replace(stack, techniques=tuple(technique | {"calibration": "none"} for technique in stack.techniques))
    for stack in OURS
)
"""The same for the cases of speed, where weights are random: calibration takes time, and changes no bytes."""
ALONE = tuple(
    WeightsAlone(f"{stack.name}, float activations", stack.techniques) for stack in (OURS[0], OURS[6])
)
"""What of a divergence is the weights'; the rest is that of activations in int8 and of the cache."""
COMPILED = Stack("int4_weight_only + torch_compile", named("int4_weight_only", compiled=True))
"""The best that the stacks reach without an operator of a whole step."""

FP32 = Stack(peers.FP32.name)
"""The baseline of a job: transformers' own decoding in float32."""
BF16 = Stack("Hugging Face eager, bf16", named("bf16"))
ELSEWHERE = tuple(peer for peer in peers.PEERS if peer.name not in (FP32.name, BF16.name))
"""What no backend runs, each in a process that takes turns with the first stack of a case."""

_SLOW = "left out at this size, where a request takes many seconds; the table of gpt2 has it"
_NO_GOAL = "left out of this run, which measured what the goals are about"


@dataclass(frozen=True)
class Goal:
    """At least `least` times as fast as `against`; `aim` is what would be better still."""

    against: Stack
    least: float
    aim: float


@dataclass(frozen=True)
class Speed:
    """`stacks` beside the first goal's, in jobs of `at_once` of them: their memory must fit.

    A stack that is compared with the second one must be in the same job, and so early in `stacks`. `elsewhere` are
    those that no backend runs; `left_out` are only named, with the reason.
    """

    case: Case
    stacks: tuple[Stack, ...]
    goals: tuple[Goal, ...]
    at_once: int = 7
    elsewhere: tuple[Peer, ...] = ELSEWHERE
    left_out: dict[str, str] = field(default_factory=dict)

    def of_goals(self) -> "Speed":
        """The case with the rows alone that its goals are about, and the default beside them."""
        names = {IN_GOALS.name, OURS[0].name, *(goal.against.name for goal in self.goals)}
        kept = tuple(stack for stack in self.stacks if stack.name in names)
        others = [stack.name for stack in self.stacks if stack not in kept] + [
            peer.name for peer in self.elsewhere
        ]
        return replace(
            self, stacks=kept, elsewhere=(), left_out=self.left_out | dict.fromkeys(others, _NO_GOAL)
        )


_OTHER_FILES = tuple(stack for stack in LLAMA_CPP if stack != Q4_0)

SPEED = {
    "decode-gpt2": Speed(
        Case("gpt2", 32, 64),
        (FP32, *UNCALIBRATED, COMPILED, BF16, *_OTHER_FILES),
        (Goal(Q4_0, 2.0, 2.7), Goal(FP32, 15, 25)),
    ),
    "decode-llama-3.2-1b": Speed(
        Case("llama-3.2-1b", 32, 64),
        (UNCALIBRATED[0], UNCALIBRATED[1], UNCALIBRATED[4], UNCALIBRATED[6], BF16, *_OTHER_FILES),
        (Goal(Q4_0, 1.35, 1.7),),
        at_once=3,
        elsewhere=(),
        left_out=dict.fromkeys((FP32.name, *(peer.name for peer in ELSEWHERE)), _SLOW),
    ),
    "prefill-gpt2": Speed(
        Case("gpt2", 128, 0, "prefill"),
        (*UNCALIBRATED, COMPILED, FP32, BF16, *_OTHER_FILES),
        (Goal(Q4_0, 1.0, 1.5),),
    ),
}
"""The cases of speed by their names."""
QUALITY = {"quality-tiny": "bundled:tiny", "quality-small": "bundled:small"}
"""The cases of quality, a trained model each: a GPT-2 and a Llama."""


def speed_goals(name: str, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal of the case with its figure, or a note that it was not measured."""
    by_name = {line["name"]: line for line in lines}
    ours = by_name[IN_GOALS.name]
    return [_goal(name, goal, ours, by_name[goal.against.name]) for goal in SPEED[name].goals]


def quality_goal(name: str, lines: Sequence[dict[str, Any]], least: str, aim: str) -> dict[str, Any]:
    """The goals' stack at most at the divergence of the line `least`; better still, and the default's aim, `aim`'s."""
    found = {line["name"]: line.get("kld_mean") for line in lines}
    ours, default, theirs, better = (found.get(name) for name in (IN_GOALS.name, OURS[0].name, least, aim))
    what = f"{name}: KLD of {IN_GOALS.name} at most {least}'s"
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
    """A goal is reached by valid results of one job."""
    what = f"{name}: {IN_GOALS.name} at least {goal.least:g}x {goal.against.name}"
    if not ours["rates"] or not theirs["rates"] or ours["group"] != theirs["group"]:
        return {"goal": f"{what}: not measured", "reached": False}
    candidate, reference = (tuple((rate,) for rate in line["rates"]) for line in (ours, theirs))
    ratio, bounds = paired_ratio(candidate, reference)
    spread = f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else ""
    found = f"{what}: {ratio:.2f}x{spread} (aim {goal.aim:g}x: {_said(ratio >= goal.aim)})"
    wrong = [f"{line['name']}: {', '.join(line['verdict'])}" for line in (ours, theirs) if line["verdict"]]
    if wrong:
        return {"goal": f"{found}; not valid ({'; '.join(wrong)})", "reached": False}
    return {"goal": found, "reached": ratio >= goal.least}
