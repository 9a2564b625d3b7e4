"""What `engines` and `engine_tools` run: each engine's stacks, and a case for each model with its budget of time."""

from dataclasses import dataclass
from typing import Any

from benchmarks.stacks import Q4_0, Q4_K_M, Stack, llama_cpp, named
from optigpu.cli.options import validated
from optigpu.job.spec import JobSpec

EAGER = Stack("torch float32")
"""The first stack of each job, and so its baseline: the model as transformers runs it."""
HYBRID = Stack("torch int8_hybrid", named("int8_hybrid"))
NATIVE = Stack("torch native_decode w4", named("native_decode"))
UNEVEN = Stack("torch native_decode w4k", named("native_decode", weights="w4k"))
UNCALIBRATED = Stack("torch native_decode w4", named("native_decode", calibration="none"))
"""Calibration gains nothing on random weights."""
Q8_0 = llama_cpp("Q8_0")
IQ4_KS = Stack("ik_llama.cpp IQ4_KS", named("gguf", type="IQ4_KS", pure=True), "ik_llama_cpp")
IQ4_K = Stack("ik_llama.cpp IQ4_K", named("gguf", type="IQ4_K", pure=True), "ik_llama_cpp")
"""ik_llama.cpp runs no GPT-2: it has rows where the model is a Llama."""
ONNX_FP32 = Stack("onnxruntime float32", (), "onnxruntime")
ONNX_INT8 = Stack("onnxruntime int8", named("onnx_int8"), "onnxruntime")
ONNX_INT4 = Stack("onnxruntime int4", named("onnx_int4"), "onnxruntime")
OPENVINO_FP32 = Stack("openvino float32", (), "openvino")
OPENVINO_INT8 = Stack("openvino int8", named("openvino_int8"), "openvino")
OPENVINO_INT4 = Stack("openvino int4", named("openvino_int4"), "openvino")

EIGHT_BITS = (Q8_0, Q4_K_M, ONNX_INT8, OPENVINO_INT8)
"""One stack of each engine at least: the first eight variants of a job take turns with one another."""
FOUR_BITS = (ONNX_INT4, OPENVINO_INT4)
FLOATS = (ONNX_FP32, OPENVINO_FP32)
SPEED = ("latency", "memory")


@dataclass(frozen=True)
class EngineCase:
    """One job. `budget_s` is how long it may measure; what is whole by then is kept.

    `replicates` and `seconds` are how many processes measure each stack, and each for how long at least.
    """

    model: str
    stacks: tuple[Stack, ...]
    budget_s: float
    name: str = "engines side by side"
    prompt_tokens: int = 32
    new_tokens: int = 64
    replicates: int = 3
    seconds: float = 2.0
    meters: tuple[str, ...] = SPEED
    quality_tokens: int = 1000

    def spec(self) -> JobSpec:
        """The first stack's job, with the others beside it. Raises SpecError for a technique that there is not."""
        first, *others = self.stacks
        return validated(
            {
                "name": self.name,
                "workload": {
                    "kind": "generate",
                    "prompt_tokens": self.prompt_tokens,
                    "new_tokens": self.new_tokens,
                },
                "model": self.model,
                "backend": first.backend,
                "stack": list(first.techniques),
                "beside": [_beside(stack) for stack in others],
                "device": "cpu",
                "measure": {
                    "replicates": self.replicates,
                    "min_seconds": self.seconds,
                    "max_seconds": 4 * self.seconds,
                    "meters": list(self.meters),
                    "quality": {"text": "wikitext-2", "tokens": self.quality_tokens},
                },
                "limits": {"timeout_s": self.budget_s, "max_variants": len(self.stacks)},
            }
        )


def _beside(stack: Stack) -> dict[str, Any]:
    return {"backend": stack.backend, "stack": list(stack.techniques), "label": stack.name}


CASES: dict[str, EngineCase] = {
    "tiny": EngineCase(
        "bundled:tiny",
        (EAGER, NATIVE, HYBRID, *EIGHT_BITS, *FOUR_BITS, *FLOATS),
        budget_s=360,
        seconds=1.0,
        meters=(*SPEED, "quality"),
    ),
    "gpt2": EngineCase(
        "preset:gpt2", (EAGER, UNCALIBRATED, HYBRID, *EIGHT_BITS, *FOUR_BITS, *FLOATS), budget_s=420
    ),
    "small": EngineCase(
        "bundled:small",
        (EAGER, NATIVE, UNEVEN, Q4_K_M, IQ4_KS, *FOUR_BITS, Q4_0, IQ4_K, Q8_0),
        budget_s=300,
        seconds=1.0,
        meters=(*SPEED, "quality"),
    ),
    # In float32 the other engines would need 5 GB each, and would show the memory's bandwidth alone.
    "llama-3.2-1b": EngineCase(
        "preset:llama-3.2-1b",
        (EAGER, UNCALIBRATED, *EIGHT_BITS, IQ4_KS, *FOUR_BITS),
        budget_s=720,
        new_tokens=32,
        replicates=2,
    ),
}
"""By the names of the files of results; together 30 minutes at most."""
