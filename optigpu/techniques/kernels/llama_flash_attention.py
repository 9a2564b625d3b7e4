from typing import Literal

from optigpu.techniques.base import EngineOptions, Expected, KernelTechnique, OnCpuEngine


class LlamaFlashAttention(OnCpuEngine, KernelTechnique):
    """Computes attention in ggml's one operator, which keeps no matrix of scores; with `enabled` false in several.

    Without the technique the engine chooses where weights are quantized, and float32 weights go without it.
    """

    backends = ("llama_cpp", "ik_llama_cpp")
    summary = "llama.cpp's attention in one operator"
    citation = "Dao et al., FlashAttention, 2022, arXiv:2205.14135"
    expected = (
        Expected(
            "arithmetic",
            "a step writes no scores [heads, context] to memory; on a CPU they are small beside the weights, so little "
            "changes before the context is long",
        ),
    )

    name: Literal["llama_flash_attention"] = "llama_flash_attention"
    enabled: bool = True

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(attention="fused" if self.enabled else "plain")
