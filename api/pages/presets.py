"""Jobs to begin with: each fills the form in."""

from api.examples import JOBS, Example

FIRST_LOOK = Example(
    "A first look: what do bf16 and int8 buy for the small model that comes with OptiGPU, on this CPU?",
    {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 32, "batch_size": 1},
        "model": "bundled:tiny",
        "device": "cpu",
        "plan": "ladder",
        "stack": [{"name": "bf16"}, {"name": "int8_weight_only"}],
        "measure": {"replicates": 1, "min_seconds": 1, "max_seconds": 4},
        "limits": {"wait_for_quiet_s": 5},
    },
)
BEST_STACK = Example(
    "Find the best stack: a search among four techniques for the fastest that stays close to fp32",
    {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1},
        "model": "bundled:tiny",
        "device": "cpu",
        "plan": "search",
        "stack": [
            {"name": "bf16"},
            {"name": "int8_weight_only"},
            {"name": "static_kv_cache"},
            {"name": "fused_gelu"},
        ],
        "measure": {"min_seconds": 2, "max_seconds": 10},
        "limits": {"max_kld": 0.05},
    },
)
PRESETS = {"first": FIRST_LOOK, "best": BEST_STACK, **JOBS}
"""By the names that addresses have."""
