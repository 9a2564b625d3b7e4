"""The rungs of the plan `memory-ladder`: one model in ever fewer bytes, from bfloat16 to 4 bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optigpu.job.spec import resolve
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique


@dataclass(frozen=True)
class Rung:
    """A row of the ladder: its label, and the techniques' names with their parameters."""

    label: str
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    backend: str = "torch"

    def stack(self, workload: str) -> tuple[Technique, ...]:
        """The resolved techniques for that kind of workload."""
        named = (TECHNIQUES[name](name=name, **parameters) for name, parameters in self.techniques.items())
        return resolve(named, workload)


_PLAIN: Mapping[str, Any] = {}

MEMORY_LADDER: tuple[Rung, ...] = (
    Rung("BF16", {"bf16": _PLAIN, "eager_attention": _PLAIN}),
    Rung("+ fused attention", {"bf16": _PLAIN, "fused_attention": _PLAIN}),
    Rung("+ torch.compile", {"bf16": _PLAIN, "fused_attention": _PLAIN, "torch_compile": _PLAIN}),
    Rung("INT8", {"bf16": _PLAIN, "llm_int8": _PLAIN}),
    Rung("NF4", {"bf16": _PLAIN, "nf4": _PLAIN}),
    Rung("GPTQ INT4", {"bf16": _PLAIN, "gptq": _PLAIN}),
    Rung("AWQ INT4", {"bf16": _PLAIN, "awq": _PLAIN}),
    Rung("GGUF Q4_K_M", {"gguf": {"type": "Q4_K_M"}}, backend="llama_cpp"),
)
