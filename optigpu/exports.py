"""The public names of `optigpu`, each with the module that defines it: `optigpu.NAME` imports that module at first use.

`optigpu/__init__.py` repeats them for type checkers; tests/unit/test_exports.py holds the two equal.
"""

EXPORTS: dict[str, str] = {
    "BenchmarkResult": "optigpu.facade.benchmark_result",
    "CUDAKernelOptimizer": "optigpu.facade.kernel_optimizer",
    "GPUProfiler": "optigpu.facade.gpu_profiler",
    "JobReport": "optigpu.facade.job_report",
    "QuantizedLinear": "optigpu.facade.quantized_linear",
    "accelerate": "optigpu.facade.accelerated",
    "ladder": "optigpu.facade.measuring",
    "leaderboard": "optigpu.facade.measuring",
    "make_it_work_hybrid": "optigpu.facade.quantized",
    "quantize": "optigpu.facade.quantized",
    "run": "optigpu.facade.measuring",
}
