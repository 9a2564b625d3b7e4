"""OptiGPU: what each optimization layer buys on your hardware, alone and stacked."""

from importlib import import_module
from typing import TYPE_CHECKING

from optigpu.exports import EXPORTS

if TYPE_CHECKING:
    from optigpu.facade.accelerated import accelerate as accelerate
    from optigpu.facade.benchmark_result import BenchmarkResult as BenchmarkResult
    from optigpu.facade.compilation import CompileOptimizer as CompileOptimizer
    from optigpu.facade.deep_learning import DeepLearningBenchmark as DeepLearningBenchmark
    from optigpu.facade.engine import BenchmarkEngine as BenchmarkEngine
    from optigpu.facade.gpu_profiler import GPUProfiler as GPUProfiler
    from optigpu.facade.job_report import JobReport as JobReport
    from optigpu.facade.kernel_optimizer import CUDAKernelOptimizer as CUDAKernelOptimizer
    from optigpu.facade.kernels import KernelOptimizer as KernelOptimizer
    from optigpu.facade.measuring import ladder as ladder
    from optigpu.facade.measuring import leaderboard as leaderboard
    from optigpu.facade.measuring import run as run
    from optigpu.facade.memory import MemoryOptimizer as MemoryOptimizer
    from optigpu.facade.quantization import QuantizationOptimizer as QuantizationOptimizer
    from optigpu.facade.quantized import make_it_work_hybrid as make_it_work_hybrid
    from optigpu.facade.quantized import quantize as quantize
    from optigpu.facade.quantized_linear import QuantizedLinear as QuantizedLinear

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
