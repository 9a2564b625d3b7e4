"""Example jobs for the API documentation; a test posts each of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A job's document with a title."""

    summary: str
    document: dict[str, object]


JOBS = {
    "ladder": Example(
        "What does each layer buy for GPT-2 on the CPU, alone and stacked?",
        {
            "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1},
            "model": "preset:gpt2",
            "device": "cpu",
            "plan": "ladder",
            "stack": [{"name": "bf16"}, {"name": "int8_weight_only"}, {"name": "torch_compile"}],
            "measure": {"replicates": 1, "min_seconds": 2, "max_seconds": 20},
        },
    ),
    "single": Example(
        "One variant on a GPU with at least 8 GB",
        {
            "workload": {"kind": "generate", "prompt_tokens": 128, "new_tokens": 128, "batch_size": 1},
            "model": "preset:llama-3.2-1b",
            "device": "cuda",
            "stack": [{"name": "bf16"}, {"name": "static_kv_cache"}],
            "target": {"min_vram_bytes": 8000000000},
        },
    ),
    "matmul": Example(
        "How fast are matrix products here?",
        {
            "workload": {"kind": "matmul", "sizes": [512, 1024], "dtypes": ["float32", "bfloat16"]},
            "device": "cpu",
        },
    ),
}
