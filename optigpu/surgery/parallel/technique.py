"""What techniques that divide a decoder among processes have in common. Imports no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from pydantic import Field

from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import ON_TEXT, Choice, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

_QUANTIZED = "awq fp8 gptq int4_weight_only int8_dynamic int8_hybrid int8_weight_only llm_int8 nf4"
_REPLACED = "fused_gelu fused_layernorm fused_qkv fused_rmsnorm fused_swiglu magnitude_pruning"
_CACHES = "int8_kv_cache sliding_kv_cache static_kv_cache"
_RECORDED = "cuda_graphs export_aot native_decode speculative_decoding torch_compile"


class ModelParallel(Technique):
    """Divides a loaded decoder among processes of this machine."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.PLACEMENT
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PROCESSES,)
    conflicts: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            **dict.fromkeys(_QUANTIZED.split(), "weights are divided as plain numbers"),
            **dict.fromkeys(_REPLACED.split(), "blocks are divided as the library made them"),
            **dict.fromkeys(_RECORDED.split(), "what is recorded or compiled runs in one process"),
            **dict.fromkeys(_CACHES.split(), "the other processes keep all keys and values as they come"),
            **dict.fromkeys(
                ("autocast", "grad_enabled"),
                "the other processes compute in the weights' numbers, without gradients",
            ),
        }
    )
    process_wide: ClassVar[bool] = True

    ways: int = Field(2, ge=2, le=16, description="Among how many processes the model is divided.")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A model that fits one process loses by it on one machine."""
        return False
