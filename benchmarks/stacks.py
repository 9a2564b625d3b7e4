"""Stacks of the engine's own backends, by the names of the tables, and the jobs that measure them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.peers import Asked
from optigpu.cli.options import validated
from optigpu.job.spec import JobSpec

FEWEST_NEW_TOKENS = 2
"""That a request has, of which only the first counts where prefill is measured."""
COMPILED = ({"name": "static_kv_cache"}, {"name": "torch_compile"})


@dataclass(frozen=True)
class Case:
    """What every subject does: decode `new_tokens` after `prompt_tokens`, or only get to the first of them."""

    preset: str
    prompt_tokens: int
    new_tokens: int
    measure: Literal["decode", "prefill"] = "decode"
    device: str = "cpu"


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
    return (*techniques, *(COMPILED if compiled else ()))


def llama_cpp(kind: str) -> Stack:
    """Of a GGUF file of that type."""
    return Stack(f"llama.cpp {kind}", named("gguf", type=kind), "llama_cpp")


LLAMA_CPP = tuple(map(llama_cpp, ("F16", "Q8_0", "Q4_0", "Q4_K_M")))
_, _, Q4_0, Q4_K_M = LLAMA_CPP


def asked_of(case: Case) -> Asked:
    """The request to a peer."""
    return Asked(f"preset:{case.preset}", case.measure, case.prompt_tokens, case.new_tokens)


def spec_of(
    stacks: Sequence[Stack],
    case: Case,
    measure: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
) -> JobSpec:
    """The job of the first stack, with the others beside it. Raises SpecError for a technique that there is not."""
    first, *others = stacks
    return validated(
        {
            "workload": {
                "kind": "generate",
                "prompt_tokens": case.prompt_tokens,
                "new_tokens": case.new_tokens if case.measure == "decode" else FEWEST_NEW_TOKENS,
            },
            "model": f"preset:{case.preset}",
            "backend": first.backend,
            "stack": list(first.techniques),
            "beside": [
                {"backend": each.backend, "stack": list(each.techniques), "label": each.name}
                for each in others
            ],
            "measure": measure or {"replicates": 1},
            "limits": limits or {},
            "device": case.device,
        }
    )


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
