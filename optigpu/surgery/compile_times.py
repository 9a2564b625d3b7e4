"""What torch spends on compiling: seconds by stage, graphs, breaks, and what it found in its caches."""

from dataclasses import dataclass

from torch._dynamo.utils import calculate_time_spent, counters

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
