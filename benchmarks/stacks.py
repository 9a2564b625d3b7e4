"""Stacks of every backend by the names of the tables, and the jobs that measure them side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optigpu.cli.options import validated
from optigpu.job.spec import JobSpec

FEWEST_NEW_TOKENS = 2
"""That a request has, of which only the first counts where prefill is measured."""
COMPILING = ({"name": "static_kv_cache"}, {"name": "torch_compile"})


@dataclass(frozen=True)
class Case:
    """What every stack does: decode `new_tokens` after `prompt_tokens`, or only get to the first of them."""

    model: str
    """The reference of a job: a preset, or a model of the models folder."""
    prompt_tokens: int
    new_tokens: int
    measure: Literal["decode", "prefill"] = "decode"

    @property
    def name(self) -> str:
        """By which a document has it."""
        return f"{self.measure}-{short_name(self.model)}"

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens of the prompt and new ones of a job's request."""
        return (self.prompt_tokens, self.new_tokens if self.measure == "decode" else FEWEST_NEW_TOKENS)


@dataclass(frozen=True)
class Stack:
    """A name for the table, the techniques as a job names them, and the backend that runs them."""

    name: str
    techniques: tuple[dict[str, Any], ...] = ()
    backend: str = "torch"


def named(*names: str, compiled: bool = False, **parameters: Any) -> tuple[dict[str, Any], ...]:
    """Techniques by their names; `parameters` belong to the last of them."""
    techniques: list[dict[str, Any]] = [{"name": name} for name in names]
    techniques[-1] |= parameters
    return (*techniques, *(COMPILING if compiled else ()))


def _gguf(name: str, kind: str, backend: str = "llama_cpp", **parameters: Any) -> Stack:
    """Of a GGUF file of that type; `pure`: all its matrices are of it."""
    return Stack(name, named("gguf", type=kind, **parameters), backend)


F16, Q8_0, Q4_0, Q4_K_M = LLAMA_CPP = tuple(
    _gguf(f"llama.cpp {kind}", kind) for kind in ("F16", "Q8_0", "Q4_0", "Q4_K_M")
)
Q4_0_HEAD = _gguf("llama.cpp Q4_0, head too", "Q4_0", pure=True)
"""All matrices in Q4_0: without that a tied embedding, and so the head, is Q6_K. Our head has 4 bits as well."""
IQ4_KS = _gguf("ik_llama.cpp IQ4_KS", "IQ4_KS", "ik_llama_cpp", pure=True)
IQ4_K = _gguf("ik_llama.cpp IQ4_K", "IQ4_K", "ik_llama_cpp", pure=True)
IK_Q4_K_M = _gguf("ik_llama.cpp Q4_K_M", "Q4_K_M", "ik_llama_cpp")
IK_Q4_0 = _gguf("ik_llama.cpp Q4_0_R8", "Q4_0_R8", "ik_llama_cpp", pure=True)
"""Rows of Q4_0 are interleaved by eights."""
IK_LLAMA_CPP = (IK_Q4_K_M, IQ4_KS, IQ4_K, IK_Q4_0)
"""It runs no GPT-2: there its rows are the reason."""
ONNX_FP32 = Stack("onnxruntime float32", (), "onnxruntime")
ONNX_INT8 = Stack("onnxruntime int8", named("onnx_int8"), "onnxruntime")
ONNX_INT4 = Stack("onnxruntime int4", named("onnx_int4"), "onnxruntime")
OPENVINO_FP32 = Stack("openvino float32", (), "openvino")
OPENVINO_INT8 = Stack("openvino int8", named("openvino_int8"), "openvino")
OPENVINO_INT4 = Stack("openvino int4", named("openvino_int4"), "openvino")
FP32 = Stack("Hugging Face eager, fp32")
"""The baseline of a job: transformers' own decoding in float32."""
BF16 = Stack("Hugging Face eager, bf16", named("bf16"))
DYNAMIC_INT8 = Stack("dynamic INT8", named("int8_dynamic"))
"""The method of PyTorch's dynamic quantization, by the operator of our technique."""
NF4 = Stack("bitsandbytes NF4, bf16", named("bf16", "nf4"))
"""In bfloat16 a CPU with AVX-512 has the fused operator of bitsandbytes; in float32 weights are widened first."""

PUBLISHED = {"gpt2": (0.27, 0.85), "gpt2-medium": (0.26, 0.93), "gpt2-large": (0.26, 0.99)}
"""gpu-poor's published share of the bytes and speed against fp32; not measured here (the table of its README)."""


def short_name(model: str) -> str:
    """A model's reference without its kind."""
    return model.partition(":")[2]


def published(model: str) -> dict[str, str]:
    """What others published of a model's decoding and nobody measured here, by whom."""
    if short_name(model) not in PUBLISHED:
        return {}
    share, ratio = PUBLISHED[short_name(model)]
    return {"gpu-poor, published and not measured here": f"{share:.0%} of the bytes, {ratio:.2f}x fp32"}


def spec_of(stacks: Sequence[Stack], model: str, shape: tuple[int, int], **fields: Any) -> JobSpec:
    """The first stack's job on the CPU, with the others beside it.

    `shape`: tokens of the prompt and new ones; `fields`: others of the job. Raises SpecError for a technique that there
    is not.
    """
    first, *others = stacks
    document = {
        "workload": {"kind": "generate", "prompt_tokens": shape[0], "new_tokens": shape[1]},
        "model": model,
        "backend": first.backend,
        "stack": list(first.techniques),
        "beside": [
            {"backend": each.backend, "stack": list(each.techniques), "label": each.name} for each in others
        ],
        "device": "cpu",
    }
    return validated(document | fields)


def measure_of(replicates: int, seconds: float, *meters: str, **quality: Any) -> dict[str, Any]:
    """How a job measures, beside speed and memory: processes of each stack, and each for how long at least."""
    return {
        "replicates": replicates,
        "min_seconds": seconds,
        "max_seconds": 4 * seconds,
        "meters": ["latency", "memory", *meters],
        "quality": quality,
    }


_BUILT = {
    "llama_cpp_flags": ("llama-cpp-python", "gguf_tensor_types"),
    "ik_llama_cpp_flags": ("ik-llama-cpp-python", "gguf_tensor_types"),
    "onnxruntime_build": ("onnxruntime", "onnx_tensor_types"),
    "openvino_build": ("openvino", "openvino_constants"),
}
"""What the facts of a run say of an engine: how it was built, by its package and where its tensors' types are."""


def details_of(facts: dict[str, Any]) -> dict[str, Any]:
    """How an engine was built, and which types a file's tensors have, of the facts of a run; empty for torch."""
    recorded = facts["recorded"]
    for built, (package, types) in _BUILT.items():
        if built in recorded:
            return {
                "flags": recorded[built],
                "threads": facts["threads"],
                "version": f"{package} {facts['versions'][package]}",
                "tensor_types": recorded[types],
            }
    return {}
