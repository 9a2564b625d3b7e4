"""torch_compile: the decode step as one compiled graph."""

import itertools
import sysconfig
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from optigpu.models.facts import ModelFacts
from optigpu.result import Environment
from optigpu.techniques.base import Choice, Notes, Phase, Step, Technique
from optigpu.vocabulary import DeviceKind, Layer, ReplicateError, UnsupportedError


class TorchCompile(Technique):
    """Compiles the decode step with TorchInductor and decodes in a lean greedy loop around it."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    summary: ClassVar[str] = "the decode step as one graph of fused kernels, in a lean greedy loop"
    citation: ClassVar[str] = "Ansel et al., PyTorch 2, ASPLOS 2024, doi:10.1145/3620665.3640366"
    expected: ClassVar[str] = "1.3x to 3x at batch 1, where the interpreter's overhead dominates"
    requires: ClassVar[tuple[str, ...]] = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {"no_kv_cache": "a compiled decode step needs a cache"}
    choices: ClassVar[tuple[Choice, ...]] = (Choice.STEP,)

    name: Literal["torch_compile"] = "torch_compile"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """TorchInductor writes C++ for a CPU and needs a compiler there."""
        if device is DeviceKind.CPU and environment.compiler is None:
            return "TorchInductor needs a C++ compiler on a CPU and there is none; install g++."
        return None

    def step(self, step: Step, notes: Notes) -> Step:
        """The step as one graph; a graph break is an error."""
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.is_file():
            raise UnsupportedError(
                f"TorchInductor needs Python's headers and {header} is missing; install them."
            )
        return _CompiledStep(step, self.mode, notes)


class _CompiledStep:
    """Compiles at its first call and makes sure that it did; from then on it takes that batch and that cache alone.

    A step has some 800 guards (235 tensors for GPT-2), and looking at them takes a tenth of the step on a CPU. One
    look at the shape and the cache says as much, because nothing else changes in a measuring process.
    """

    def __init__(self, step: Step, mode: str, notes: Notes) -> None:
        import torch

        options = torch._inductor.list_mode_options(mode) | {"guard_filter_fn": _no_guards}
        self._compiled = torch.compile(_with_own_code(step), fullgraph=True, dynamic=False, options=options)
        self._notes = notes
        self._compiled_for: tuple[Any, Any] | None = None

    def __call__(self, tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
        import torch

        if self._compiled_for is None:
            return self._first_call(tokens, position, cache)
        shape, known_cache = self._compiled_for
        if tokens.shape != shape or cache is not known_cache:
            raise ReplicateError(
                "A compiled step takes the batch size and the cache that it was compiled for; start another process."
            )
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(tokens, position, cache)

    def _first_call(self, tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        result = self._compiled(tokens, position, cache)
        graphs = counters["stats"]["unique_graphs"] - before
        if graphs != 1:
            raise UnsupportedError(
                f"torch.compile made {graphs} graphs and not one; is it disabled by the environment?"
            )
        self._compiled_for = (tokens.shape, cache)
        self._notes.record(
            compiled_graphs=graphs,
            graph_breaks=sum(counters["graph_break"].values()),
            inductor_cache_hits=counters["inductor"]["fxgraph_cache_hit"],
        )
        return result


def _with_own_code(step: Step) -> Step:
    """The step as a function with a code object of its own: what torch.compile made is found again by that alone."""

    def decode_step(tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
        return step(tokens, position, cache)

    code = decode_step.__code__.replace(co_name=f"decode_step_{next(_NUMBERS)}")
    return types.FunctionType(code, globals(), code.co_name, None, decode_step.__closure__)


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


_NUMBERS = itertools.count()
