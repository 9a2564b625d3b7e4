"""The public names of `optigpu`, each with the module that defines it: `optigpu.NAME` imports that module at first use.

`optigpu/__init__.py` repeats them for type checkers; tests/unit/test_exports.py holds the two equal.
"""

EXPORTS: dict[str, str] = {
    "BenchmarkEngine": "optigpu.facade.engine",
    "BenchmarkResult": "optigpu.facade.benchmark_result",
    "CUDAKernelOptimizer": "optigpu.facade.kernel_optimizer",
    "CompileOptimizer": "optigpu.facade.compilation",
    "DeepLearningBenchmark": "optigpu.facade.deep_learning",
    "GPUProfiler": "optigpu.facade.gpu_profiler",
    "JobReport": "optigpu.facade.job_report",
    "KernelOptimizer": "optigpu.facade.kernels",
    "MemoryOptimizer": "optigpu.facade.memory",
    "QuantizationOptimizer": "optigpu.facade.quantization",
    "QuantizedLinear": "optigpu.facade.quantized_linear",
    "accelerate": "optigpu.facade.accelerated",
    "ladder": "optigpu.facade.measuring",
    "leaderboard": "optigpu.facade.measuring",
    "make_it_work_hybrid": "optigpu.facade.quantized",
    "quantize": "optigpu.facade.quantized",
    "run": "optigpu.facade.measuring",
}
