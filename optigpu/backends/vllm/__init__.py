"""The vllm backend: vLLM's engine in the measuring process, without a server, in an environment of its own.

vLLM's build for CPUs and its build for CUDA are two packages; `optigpu engines install vllm` takes the one that fits
the machine. Only `start` and `prepare` import vLLM.

What vLLM is told of an order is plain data here: the names are those of its EngineArgs.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend, room_of
from optigpu.documents.facts import ModelFacts
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import DeviceKind


class VllmBackend(EngineBackend):
    """Decodes models that vLLM knows, from safetensors; the engine is made for the lengths of one workload."""

    name = "vllm"
    summary = "vLLM's engine without a server, with a cache in pages"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)
    workloads = ("generate",)

    def use_threads(self, count: int) -> None:
        """vLLM reads the variables when it is loaded; it would bind its threads to cores that others may use."""
        os.environ["OMP_NUM_THREADS"] = str(count)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's own error on a GPU, and what the allocator of a CPU says."""
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


GIB = 2**30
_WIDTHS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class EngineSettings:
    """The arguments of one engine. Each prompt goes through in one pass, and nothing of it is kept for the next.

    `kv_cache_dtype` "auto" is `dtype`. The tokenizer is left out, since prompts are ids and outputs stay ids.
    """

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = False
    async_scheduling: bool = False
    skip_tokenizer_init: bool = True
    load_format: Literal["safetensors"] = "safetensors"
    generation_config: Literal["vllm"] = "vllm"
    disable_log_stats: bool = True

    @property
    def keywords(self) -> dict[str, object]:
        """The keyword arguments of EngineArgs."""
        return asdict(self)


def settings_of(order: Order, folder: Path, facts: ModelFacts) -> EngineSettings:
    """The engine for an order's workload: as many sequences, as long, and no room beyond them."""
    rows, length = room_of(order, facts)
    options = engine_options(order.stack)
    return EngineSettings(
        model=str(folder),
        dtype=options.weights,
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * length,
        seed=order.seed % 2**32,
        kv_cache_dtype=options.cache or "auto",
    )


def cache_gib(settings: EngineSettings, facts: ModelFacts) -> int:
    """The whole GiB that keys and values of all sequences take at most, 1 at least: what a CPU sets aside for them."""
    width = _WIDTHS.get(settings.dtype, 4)
    token = 2 * facts.layers * facts.kv_heads * facts.head_size * width
    return 1 + settings.max_num_seqs * settings.max_model_len * token // GIB
