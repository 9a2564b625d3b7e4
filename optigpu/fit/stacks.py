"""The stacks that `optigpu fit` tries on a GPU."""

from dataclasses import dataclass

from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.catalog import Device
from optigpu.job.memory_ladder import MEMORY_LADDER
from optigpu.job.spec import resolve
from optigpu.surgery.gptqmodel.recipe import conv1d_reason
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.techniques.quantization.awq import Awq

WORKLOAD = "generate"


@dataclass(frozen=True)
class NamedStack:
    """A resolved stack of a backend with the label of its row."""

    label: str
    techniques: tuple[Technique, ...]
    backend: str = "torch"


def stack_of(techniques: tuple[Technique, ...], label: str | None = None) -> NamedStack:
    """A stack that was asked for. Raises SpecError when two techniques exclude each other."""
    resolved = resolve(techniques, WORKLOAD)
    backend = next((name for each in resolved for name in each.backends if name != "torch"), "torch")
    names = " + ".join(technique.name for technique in resolved) or "fp32"
    return NamedStack(label or names, resolved, backend)


def usual_stacks(card: Device, facts: ModelFacts) -> tuple[NamedStack, ...]:
    """From 32 bits a weight to 4, in the half precision that the card's matrix units have."""
    half = "bf16" if "bf16" in card.peak_flop_per_s else "fp16"
    names: list[tuple[str, ...]] = [
        (),
        (half,),
        (half, "int8_kv_cache"),
        (half, "int8_weight_only"),
        *([(half, "fp8")] if "fp8" in card.peak_flop_per_s else []),
        (half, "llm_int8"),
        (half, "nf4"),
        (half, "int4_weight_only"),
        (half, "gptq"),
        (half, "awq"),
        (half, "int8_kv_cache", "int4_weight_only"),
        (half, "cpu_offload"),
    ]
    stacks = (stack_of(tuple(TECHNIQUES[name](name=name) for name in each)) for each in names)
    return tuple(stack for stack in (*stacks, _gguf()) if _applies(stack, facts))


def cpu_stacks() -> tuple[NamedStack, ...]:
    """Those with operators for a CPU, from 32 bits a weight to 4."""
    names: tuple[tuple[str, ...], ...] = (
        (),
        ("int8_weight_only",),
        ("int8_hybrid",),
        ("int4_weight_only",),
        ("native_decode",),
    )
    plain = (stack_of(tuple(TECHNIQUES[name](name=name) for name in each)) for each in names)
    return (*plain, _gguf())


def _gguf() -> NamedStack:
    four_bits = TECHNIQUES["gguf"].model_validate({"name": "gguf", "type": "Q4_K_M"})
    return stack_of((four_bits,), "gguf Q4_K_M")


def memory_ladder() -> tuple[NamedStack, ...]:
    """The rungs of the plan of that name."""
    return tuple(NamedStack(rung.label, rung.stack(WORKLOAD), rung.backend) for rung in MEMORY_LADDER)


def _applies(stack: NamedStack, facts: ModelFacts) -> bool:
    return not (any(isinstance(each, Awq) for each in stack.techniques) and conv1d_reason(facts.family))
