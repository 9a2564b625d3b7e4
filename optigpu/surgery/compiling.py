"""What torch.compile makes of a decode step, a forward pass and a loss, and what it spends on that.

Also whether a function that is compiled, exported or captured gets shapes that it knows.
"""

import itertools
import re
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported, UserError
from torch._dynamo.utils import calculate_time_spent, counters
from torch._inductor.exc import InductorError
from torch.utils._pytree import tree_leaves
from transformers import Cache

from optigpu.backends.training import LossOf, MicroBatch
from optigpu.techniques.base import Notes
from optigpu.vocabulary import ReplicateError, UnsupportedError, first_line, unsupported

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


MANY_RECOMPILES = 256
"""With graph breaks a layer is a graph of its own, and torch's limit of 8 would run the ninth in the interpreter."""


@dataclass(frozen=True)
class CompileOptions:
    """Arguments of torch.compile, with its names; `mode` is TorchInductor's."""

    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool = False


class Compiled:
    """Compiles at its first call and checks that it did; unless `dynamic`, later calls need the same shapes.

    A step has some 800 guards (235 tensors for GPT-2), and looking at them takes a tenth of the step on a CPU. One
    look at the shape and the cache says as much, because nothing else changes in a measuring process. What is dynamic
    is guarded by the shapes of its arguments, and what has breaks by all guards: they tell its layers apart.
    """

    def __init__(
        self, options: CompileOptions, name: str, function: Callable[..., Any], notes: Notes
    ) -> None:
        is_inductor = options.backend == "inductor"
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if is_inductor and not header.is_file():
            raise UnsupportedError(
                f"TorchInductor needs Python's headers, and {header} is missing; install the package python3-dev."
            )
        if not options.fullgraph:
            torch._dynamo.config.recompile_limit = MANY_RECOMPILES
        if options.dynamic:
            # Or a batch of two and two heads would be one size, and the graph would hold for both or for none.
            torch.fx.experimental._config.use_duck_shape = False
        self._dynamic, self._fullgraph = options.dynamic, options.fullgraph
        self._notes = notes
        self._made_for: MadeFor | None = None
        settings: dict[str, Any] = torch._inductor.list_mode_options(options.mode) if is_inductor else {}
        if options.fullgraph:
            settings["guard_filter_fn"] = (
                _guards_of_arguments if options.dynamic else lambda guards: [False] * len(guards)
            )
        self._compiled = torch.compile(
            _with_own_code(name, function),
            fullgraph=options.fullgraph,
            dynamic=options.dynamic,
            backend=options.backend,
            options=settings,
        )

    def __call__(self, *arguments: Any) -> Any:
        if self._made_for is None:
            return self._first_call(*arguments)
        if not self._dynamic:
            require_same("torch_compile", self._made_for, *arguments)
        torch.compiler.cudagraph_mark_step_begin()
        try:
            return self._compiled(*arguments)
        except AssertionError as error:
            raise UnsupportedError(_own_fault(first_line(error))) from error

    def _first_call(self, *arguments: Any) -> Any:
        before = compile_facts()
        sentence = "torch_compile cannot make one graph of this model ({}); set fullgraph to false."
        with (
            unsupported((InternalTorchDynamoError, InductorError, AssertionError), _own_fault),
            unsupported((Unsupported, UserError, TorchRuntimeError), sentence.format),
        ):
            result = self._compiled(*arguments)
        facts = compile_facts(before)
        graphs = facts["compiled_graphs"]
        if graphs == 0 or (self._fullgraph and graphs != 1):
            raise UnsupportedError(
                f"torch.compile made {graphs} graphs instead of one; check whether the environment disables it."
            )
        self._made_for = made_for(*arguments)
        self._notes.record(**facts)
        return result


def _own_fault(why: str) -> str:
    """Of torch: Dynamo fails, or a tensor comes with other strides than Inductor's code asserts."""
    return f"torch_compile: torch fails to compile this model ({why}); leave torch_compile out of the stack."


def _guards_of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Those whose name begins with an argument, as in "cache.layers[0].keys", and that on how shapes relate."""
    return [
        guard.guard_type == "SHAPE_ENV" or re.split(r"\W", guard.name, maxsplit=1)[0] in _ARGUMENTS
        for guard in guards
    ]


_ARGUMENTS = {"tokens", "position", "cache", "inputs"}


def _with_own_code(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function with a new code object, by which torch.compile finds its code again."""

    def decode_step(tokens: Any, position: Any, cache: Any) -> Any:
        return function(tokens, position, cache)

    def forward_pass(inputs: Any) -> Any:
        return function(inputs)

    own = {"decode_step": decode_step, "forward_pass": forward_pass}[name]
    code = own.__code__.replace(co_name=f"{name}_{next(_NUMBERS)}")
    return types.FunctionType(code, globals(), code.co_name, None, own.__closure__)


_NUMBERS = itertools.count()


class CompiledLoss:
    """Compiles at its first call and checks that it did.

    The graph of the backward pass may be compiled when that runs, so the times are recorded again at the second call.
    """

    def __init__(self, options: CompileOptions, loss: LossOf, notes: Notes) -> None:
        self._fullgraph, self._notes = options.fullgraph, notes
        self._before = compile_facts()
        self._calls = 0
        is_inductor = options.backend == "inductor"
        self._compiled = cast(
            LossOf,
            torch.compile(
                loss,
                fullgraph=options.fullgraph,
                backend=options.backend,
                options=torch._inductor.list_mode_options(options.mode) if is_inductor else None,
            ),
        )

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            return self._first_call(micro)
        if self._calls == 2:
            self._record()
        return self._compiled(micro)

    def _first_call(self, micro: MicroBatch) -> torch.Tensor:
        self._before = compile_facts()
        try:
            loss = self._compiled(micro)
        except Unsupported as error:
            raise UnsupportedError(
                f"compile_training cannot make one graph of this step ({first_line(error)}); set fullgraph to false."
            ) from error
        except InternalTorchDynamoError as error:
            raise UnsupportedError(
                f"torch.compile does not know what another technique does in this step ({first_line(error)}); leave "
                "one of the two out of the stack."
            ) from error
        if not self._record():
            raise UnsupportedError(
                "torch.compile made no graph of this step; check whether the environment disables it."
            )
        return loss

    def _record(self) -> float:
        """Notes what was compiled since the first call; returns the number of graphs."""
        facts = compile_facts(self._before)
        self._notes.record(**facts)
        return facts["compiled_graphs"]
