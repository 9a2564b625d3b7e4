"""The public names of `optigpu`, each with the module that defines it: `optigpu.NAME` imports that module at first use.

`optigpu/__init__.py` repeats them for type checkers; tests/unit/test_exports.py holds the two equal.
"""

EXPORTS: dict[str, str] = {
    "BenchmarkEngine": "optigpu.facade.engine",
    "BenchmarkResult": "optigpu.facade.benchmark_result",
    "CachedMultiHeadAttention": "optigpu.facade.functions.cached_decoder",
    "CachedTransformerDecoder": "optigpu.facade.functions.cached_decoder",
    "CheckpointedTransformerBlock": "optigpu.facade.functions.checkpointing",
    "CompileOptimizer": "optigpu.facade.compilation",
    "DeepLearningBenchmark": "optigpu.facade.deep_learning",
    "JobReport": "optigpu.facade.job_report",
    "KernelOptimizer": "optigpu.facade.kernels",
    "MemoryOptimizer": "optigpu.facade.memory",
    "QuantizationOptimizer": "optigpu.facade.quantization",
    "accelerate": "optigpu.facade.accelerated",
    "benchmark_attention_implementations": "optigpu.facade.functions.attention",
    "benchmark_generation": "optigpu.facade.functions.cached_decoder",
    "benchmark_torch_compile": "optigpu.facade.functions.compiled",
    "compare_checkpointing": "optigpu.facade.functions.checkpointing",
    "compare_precisions": "optigpu.facade.functions.precisions",
    "enable_gradient_checkpointing_hf": "optigpu.facade.functions.checkpointing",
    "flash_attention_native": "optigpu.facade.functions.attention",
    "ladder": "optigpu.facade.measuring",
    "leaderboard": "optigpu.facade.measuring",
    "recommend_optimization": "optigpu.facade.recommendations",
    "run": "optigpu.facade.measuring",
    "simulate_matmul": "optigpu.facade.predictions",
    "simulate_matmul_devices": "optigpu.facade.predictions",
    "standard_attention": "optigpu.facade.functions.attention",
    "train_step_bf16": "optigpu.facade.functions.train_steps",
    "train_step_fp16": "optigpu.facade.functions.train_steps",
    "train_step_fp32": "optigpu.facade.functions.train_steps",
    "train_with_gradient_accumulation": "optigpu.facade.functions.train_steps",
}
