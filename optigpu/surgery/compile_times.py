"""What torch spends on compiling, and whether a compiled, exported or captured function gets shapes that it knows."""

from dataclasses import dataclass

import torch
from torch._dynamo.utils import calculate_time_spent, counters
from torch.utils._pytree import tree_leaves
from transformers import Cache

from optigpu.vocabulary import ReplicateError

_AUTOTUNING = ("autotun", "tuning", "benchmark")
"""Parts of the names under which TorchInductor records its autotuning times."""


@dataclass(frozen=True)
class CompileTimes:
    """Counts and seconds of a process so far.

    `trace_s` is TorchDynamo's part, `backend_s` all that comes after it (AOTAutograd, TorchInductor), of which
    `build_s` is waiting for kernels to be built and `autotune_s` is autotuning. A frame that is not compiled runs in
    the interpreter.
    """

    graphs: int
    breaks: int
    frames: int
    frames_compiled: int
    cache_hits: int
    cache_misses: int
    trace_s: float
    backend_s: float
    build_s: float
    autotune_s: float

    def since(self, earlier: "CompileTimes") -> "CompileTimes":
        """The difference from earlier counts."""
        return CompileTimes(*(vars(self)[name] - vars(earlier)[name] for name in vars(self)))

    def facts(self) -> dict[str, int | float]:
        """For a result's details. These seconds are part of `compile_s` and of no request that is timed."""
        return {
            "compiled_graphs": self.graphs,
            "graph_breaks": self.breaks,
            "frames_interpreted": self.frames - self.frames_compiled,
            "inductor_cache_hits": self.cache_hits,
            "inductor_cache_misses": self.cache_misses,
            "compile_trace_s": self.trace_s,
            "compile_backend_s": self.backend_s,
            "compile_build_s": self.build_s,
            "compile_autotune_s": self.autotune_s,
        }


def compile_times() -> CompileTimes:
    """Reads torch's own counters, which hold for the whole process."""
    seconds = calculate_time_spent()
    whole, backend = seconds.get("entire_frame_compile", 0.0), seconds.get("backend_compile", 0.0)
    tuning = (spent for name, spent in seconds.items() if any(part in name for part in _AUTOTUNING))
    return CompileTimes(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        frames=counters["frames"]["total"],
        frames_compiled=counters["frames"]["ok"],
        cache_hits=counters["inductor"]["fxgraph_cache_hit"],
        cache_misses=counters["inductor"]["fxgraph_cache_miss"]
        + counters["inductor"]["fxgraph_cache_bypass"],
        trace_s=max(0.0, whole - backend),
        backend_s=backend,
        build_s=seconds.get("async_compile.wait", 0.0),
        autotune_s=sum(tuning, 0.0),
    )


MadeFor = tuple[object, ...]
"""The shape of each tensor among the arguments, and the others themselves."""


def made_for(*arguments: object) -> MadeFor:
    """The shapes and arguments for which a first call makes a function."""
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
    """Whether a cache has allocated its tensors; the library does so at the first token."""
    return all(getattr(layer, "is_initialized", False) for layer in cache.layers)
