"""OptiGPU: what each optimization layer buys on your hardware, alone and stacked."""

from importlib import import_module
from typing import TYPE_CHECKING

from optigpu.exports import EXPORTS

if TYPE_CHECKING:
    from optigpu.facade.attention import CachedMultiHeadAttention as CachedMultiHeadAttention
    from optigpu.facade.attention import CachedTransformerDecoder as CachedTransformerDecoder
    from optigpu.facade.attention import (
        benchmark_attention_implementations as benchmark_attention_implementations,
    )
    from optigpu.facade.attention import benchmark_generation as benchmark_generation
    from optigpu.facade.attention import flash_attention_native as flash_attention_native
    from optigpu.facade.attention import standard_attention as standard_attention
    from optigpu.facade.benchmark_result import BenchmarkResult as BenchmarkResult
    from optigpu.facade.deep_learning import DeepLearningBenchmark as DeepLearningBenchmark
    from optigpu.facade.engine import BenchmarkEngine as BenchmarkEngine
    from optigpu.facade.gpu_profiler import GPUProfiler as GPUProfiler
    from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer as CUDAKernelOptimizer
    from optigpu.facade.kernel_optimizer import simulate_matmul as simulate_matmul
    from optigpu.facade.kernel_optimizer import simulate_matmul_devices as simulate_matmul_devices
    from optigpu.facade.measuring import JobReport as JobReport
    from optigpu.facade.measuring import ladder as ladder
    from optigpu.facade.measuring import leaderboard as leaderboard
    from optigpu.facade.measuring import run as run
    from optigpu.facade.optimizers import CompileOptimizer as CompileOptimizer
    from optigpu.facade.optimizers import KernelOptimizer as KernelOptimizer
    from optigpu.facade.optimizers import MemoryOptimizer as MemoryOptimizer
    from optigpu.facade.quantized import QuantizationOptimizer as QuantizationOptimizer
    from optigpu.facade.quantized import accelerate as accelerate
    from optigpu.facade.quantized import make_it_work_hybrid as make_it_work_hybrid
    from optigpu.facade.quantized import quantize as quantize
    from optigpu.facade.quantized_linear import QuantizedLinear as QuantizedLinear
    from optigpu.facade.recommendations import recommend_optimization as recommend_optimization
    from optigpu.facade.timing import benchmark_torch_compile as benchmark_torch_compile
    from optigpu.facade.training import (
        CheckpointedTransformerBlock as CheckpointedTransformerBlock,
    )
    from optigpu.facade.training import compare_checkpointing as compare_checkpointing
    from optigpu.facade.training import compare_precisions as compare_precisions
    from optigpu.facade.training import (
        enable_gradient_checkpointing_hf as enable_gradient_checkpointing_hf,
    )
    from optigpu.facade.training import train_step_bf16 as train_step_bf16
    from optigpu.facade.training import train_step_fp16 as train_step_fp16
    from optigpu.facade.training import train_step_fp32 as train_step_fp32
    from optigpu.facade.training import (
        train_with_gradient_accumulation as train_with_gradient_accumulation,
    )

__version__ = "0.1.0"
__all__ = [*EXPORTS, "__version__"]

if not TYPE_CHECKING:  # else a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Imports a public name where it is first used, so that `import optigpu` costs nothing (PEP 562)."""
        if name not in EXPORTS:
            raise AttributeError(
                f"module 'optigpu' has no attribute {name!r}; dir(optigpu) lists what it has."
            )
        found = globals()[name] = getattr(import_module(EXPORTS[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
