"""The public names of `optigpu`, each with the module that defines it: `optigpu.NAME` imports that module at first use.

`optigpu/__init__.py` repeats them for type checkers; tests/unit/test_exports.py holds the two equal.
"""

_BY_MODULE = {
    "benchmark_result": "BenchmarkResult",
    "deep_learning": "DeepLearningBenchmark",
    "engine": "BenchmarkEngine",
    "attention": "CachedMultiHeadAttention CachedTransformerDecoder benchmark_attention_implementations "
    "benchmark_generation flash_attention_native standard_attention",
    "training": "CheckpointedTransformerBlock compare_checkpointing enable_gradient_checkpointing_hf "
    "compare_precisions train_step_bf16 train_step_fp16 train_step_fp32 train_with_gradient_accumulation",
    "timing": "benchmark_torch_compile",
    "gpu_profiler": "GPUProfiler",
    "kernel_optimizer": "CUDAKernelOptimizer simulate_matmul simulate_matmul_devices",
    "measuring": "JobReport ladder leaderboard run",
    "optimizers": "CompileOptimizer KernelOptimizer MemoryOptimizer",
    "quantized": "QuantizationOptimizer accelerate make_it_work_hybrid quantize",
    "quantized_linear": "QuantizedLinear",
    "recommendations": "recommend_optimization",
}
EXPORTS: dict[str, str] = {
    name: f"optigpu.facade.{module}" for module, names in _BY_MODULE.items() for name in names.split()
}
