"""The cases of `vs_peers`: stacks and workloads. Its goals are those of `vs_goals`."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from benchmarks.stacks import (
    BF16,
    DYNAMIC_INT8,
    F16,
    FP32,
    IK_LLAMA_CPP,
    IK_Q4_0,
    IK_Q4_K_M,
    IQ4_K,
    IQ4_KS,
    LLAMA_CPP,
    NF4,
    ONNX_INT4,
    ONNX_INT8,
    OPENVINO_INT4,
    OPENVINO_INT8,
    Q4_0,
    Q4_0_HEAD,
    Q4_K_M,
    Q8_0,
    Case,
    Stack,
    named,
)

OURS = (
    Stack("native_decode w4", named("native_decode", weights="w4")),
    Stack("native_decode w4, groups of 64", named("native_decode", weights="w4", group=64)),
    Stack("native_decode w4, groups of 128", named("native_decode", weights="w4", group=128)),
    Stack("native_decode w4, int8 cache", named("native_decode", weights="w4", kv="int8")),
    Stack("native_decode w4k", named("native_decode", weights="w4k")),
    Stack("native_decode w4k, groups of 64", named("native_decode", weights="w4k", group=64)),
    Stack("native_decode w3k", named("native_decode", weights="w3k")),
    *(Stack(f"native_decode {kind}", named("native_decode", weights=kind)) for kind in ("w5", "w6", "w8")),
    Stack("native_decode bf16", named("native_decode", weights="bf16")),
    Stack("native_decode", named("native_decode")),
)
"""Our stacks, the last with the technique's own defaults."""
IN_GOALS = OURS[1]
"""What the goals are about, of speed and of quality alike: it reads less than w4 and diverges more, but still less than
the peer's 4 bits."""


def uncalibrated(stack: Stack) -> Stack:
    """The same for the cases of speed, where weights are random: calibration takes time, and changes no bytes."""
    return replace(
        stack, techniques=tuple(technique | {"calibration": "none"} for technique in stack.techniques)
    )


_W4, TIMED, _G128, _INT8_CACHE, _W4K, _W4K_64, _W3K, _W5, _W6, _W8, _BF16, _ = map(uncalibrated, OURS)
"""TIMED is what the goals of speed are about: it stands in every job, so that each ratio is one of pairs."""
COMPILED = Stack("int4_weight_only + torch_compile", named("int4_weight_only", compiled=True))
"""The best that the stacks reach without an operator of a whole step."""
NOT_PEERS = frozenset(stack.name for stack in (*OURS, COMPILED))

EIGHT_BITS = (OPENVINO_INT8, ONNX_INT8)
FOUR_BITS = (OPENVINO_INT4, ONNX_INT4)
ENGINES = (*LLAMA_CPP, Q4_0_HEAD, *IK_LLAMA_CPP, *FOUR_BITS, *EIGHT_BITS)
"""The peers that another backend than torch runs."""
WIDE = frozenset(stack.name for stack in (FP32, BF16, F16))
"""Peers of 16 bits a weight and more: each engine reads half as much in 8 bits, which count as well."""

REAL = ("smollm2-135m", "gemma3-270m")
"""Models that people use; `optigpu models get` brings them."""

_SLOW = "left out at this size, where a request takes many seconds; the table of gpt2 has it"
_WIDER = "left out at this size: llama.cpp Q4_K_M diverges little as well, and reads 40% less"
_NO_GPT_2 = "ik_llama.cpp runs no GPT-2: it ends on an assertion in the norm before the MLP"
_NO_GOAL = "left out of this run, which measured what the goals are about"


@dataclass(frozen=True)
class Speed:
    """Jobs of TIMED and the first stack with `at_once` of `stacks`, whose memory must fit beside them.

    One request gives the figures of all `cases`, which differ in nothing but what is measured. `budget_s` is how long
    the jobs may take together, `short_s` in a run for the goals alone: what is whole by then is kept. `left_out` are
    only named, with the reason.
    """

    cases: tuple[Case, ...]
    stacks: tuple[Stack, ...]
    budget_s: float
    short_s: float
    replicates: int = 3
    at_once: int = 6
    left_out: dict[str, str] = field(default_factory=dict)

    def of_goals(self, counting: Collection[str]) -> "Speed":
        """The case with the rows alone that its goals are about: llama.cpp Q4_0 and the peers that count, by name."""
        kept = {Q4_0.name, Q4_0_HEAD.name, *counting} - WIDE
        others = dict.fromkeys(
            sorted(stack.name for stack in self.stacks if stack.name not in kept), _NO_GOAL
        )
        stacks = tuple(stack for stack in self.stacks if stack.name in kept)
        return replace(self, stacks=stacks, budget_s=self.short_s, left_out=self.left_out | others)


_NO_IK = dict.fromkeys((stack.name for stack in IK_LLAMA_CPP), _NO_GPT_2)
_FIRST = (Q4_0_HEAD, Q4_K_M, Q8_0, *EIGHT_BITS)
"""In the first job of a case: what may be the best of the peers that count."""
_REST = (
    *(*FOUR_BITS, DYNAMIC_INT8, NF4, _W4, _W4K, _W4K_64, _W3K, _G128, _INT8_CACHE, _W5, _W6, _W8, _BF16),
    *(FP32, BF16, F16, COMPILED),
)

SPEED = {
    "decode-gpt2": Speed(
        (Case("preset:gpt2", 32, 64),), (*_FIRST, *_REST), budget_s=500, short_s=270, left_out=_NO_IK
    ),
    "prefill-gpt2": Speed(
        (Case("preset:gpt2", 128, 0, "prefill"),),
        (*_FIRST, *_REST),
        budget_s=400,
        short_s=200,
        left_out=_NO_IK,
    ),
    # Loading takes most of a process's time, so one request gives both figures.
    "llama-3.2-1b": Speed(
        (Case("preset:llama-3.2-1b", 128, 32), Case("preset:llama-3.2-1b", 128, 32, "prefill")),
        (
            *(Q4_0_HEAD, Q4_K_M, IK_Q4_K_M, *EIGHT_BITS, *FOUR_BITS, IQ4_KS, IQ4_K, IK_Q4_0),
            *(DYNAMIC_INT8, _W4, _W4K, _W3K),
        ),
        budget_s=800,
        short_s=420,
        replicates=2,
        left_out={Q8_0.name: _WIDER}
        | dict.fromkeys((stack.name for stack in (FP32, BF16, F16, NF4, COMPILED)), _SLOW),
    ),
} | {
    name: Speed(
        (Case(f"path:{name}", 128, 64), Case(f"path:{name}", 128, 64, "prefill")),
        (*_FIRST, *IK_LLAMA_CPP, *_REST),
        budget_s=500,
        short_s=250,
    )
    for name in REAL
}
"""The cases of speed by their names on the command line."""
QUALITY = {"quality-tiny": "bundled:tiny", "quality-small": "bundled:small"} | {
    f"quality-{name}": f"path:{name}" for name in REAL
}
"""The cases of quality, a trained model each."""
KIN = {"preset:gpt2": "quality-tiny", "preset:llama-3.2-1b": "quality-small"} | {
    f"path:{name}": f"quality-{name}" for name in REAL
}
"""The case of quality of a model: a preset's weights are random, so it has the trained model of its architecture."""
