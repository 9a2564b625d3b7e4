"""What torch spends on compiling, and whether a compiled, exported or captured function gets shapes that it knows."""

from collections.abc import Mapping

import torch
from torch._dynamo.utils import calculate_time_spent, counters
from torch.utils._pytree import tree_leaves
from transformers import Cache

from optigpu.vocabulary import ReplicateError

_AUTOTUNING = ("autotun", "tuning", "benchmark")
"""Parts of the names under which TorchInductor records its autotuning times."""


def compile_facts(since: Mapping[str, float] | None = None) -> dict[str, int | float]:
    """A result's details of compiling: counts and seconds of this process by torch's own counters, less those `since`.

    `compile_trace_s` is TorchDynamo's, `compile_backend_s` what comes after it (AOTAutograd, TorchInductor); of that
    `compile_build_s` is waiting for kernels. They are part of `compile_s` and of no request that is timed.
    """
    seconds = calculate_time_spent()
    whole, backend = seconds.get("entire_frame_compile", 0.0), seconds.get("backend_compile", 0.0)
    tuning = (spent for name, spent in seconds.items() if any(part in name for part in _AUTOTUNING))
    inductor, frames = counters["inductor"], counters["frames"]
    found = {
        "compiled_graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "frames_interpreted": frames["total"] - frames["ok"],
        "inductor_cache_hits": inductor["fxgraph_cache_hit"],
        "inductor_cache_misses": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        "compile_trace_s": max(0.0, whole - backend),
        "compile_backend_s": backend,
        "compile_build_s": seconds.get("async_compile.wait", 0.0),
        "compile_autotune_s": sum(tuning, 0.0),
    }
    return {name: value - since[name] for name, value in found.items()} if since else found


MadeFor = tuple[object, ...]
"""The shape of each tensor among the arguments, and the others themselves."""


def made_for(*arguments: object) -> MadeFor:
    return tuple(getattr(argument, "shape", argument) for argument in arguments)


def require_same(technique: str, known: MadeFor, *arguments: object) -> None:
    """Raises ReplicateError when a function that was made for `known` is called with something else."""
    if made_for(*arguments) != known:
        raise ReplicateError(
            f"What {technique} made takes only the batch size, the lengths and the cache of its first call; measure "
            "other shapes in another process."
        )


def cache_tensors(cache: Cache) -> list[torch.Tensor]:
    """The tensors that a transformers cache writes in place, each once."""
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def is_filled(cache: Cache) -> bool:
    return all(getattr(layer, "is_initialized", False) for layer in cache.layers)
