"""What torch.compile makes of a decode step or a forward pass."""

import itertools
import re
import sysconfig
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported, UserError
from torch._inductor.exc import InductorError

from optigpu.surgery.compile_times import MadeFor, compile_facts, made_for, require_same
from optigpu.techniques.base import Notes
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.vocabulary import UnsupportedError, first_line, unsupported

MANY_RECOMPILES = 256
"""With graph breaks a layer is a graph of its own, and torch's limit of 8 would run the ninth in the interpreter."""


class Compiled:
    """Compiles at its first call and checks that it did; unless `dynamic`, later calls need the same shapes.

    A step has some 800 guards (235 tensors for GPT-2), and looking at them takes a tenth of the step on a CPU. One
    look at the shape and the cache says as much, because nothing else changes in a measuring process. What is dynamic
    is guarded by the shapes of its arguments, and what has breaks by all guards: they tell its layers apart.
    """

    def __init__(
        self, technique: TorchCompile, name: str, function: Callable[..., Any], notes: Notes
    ) -> None:
        is_inductor = technique.backend == "inductor"
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if is_inductor and not header.is_file():
            raise UnsupportedError(
                f"TorchInductor needs Python's headers, and {header} is missing; install the package python3-dev."
            )
        if not technique.fullgraph:
            torch._dynamo.config.recompile_limit = MANY_RECOMPILES
        if technique.dynamic:
            # Or a batch of two and two heads would be one size, and the graph would hold for both or for none.
            torch.fx.experimental._config.use_duck_shape = False
        self._technique = technique
        self._notes = notes
        self._made_for: MadeFor | None = None
        options: dict[str, Any] = torch._inductor.list_mode_options(technique.mode) if is_inductor else {}
        if technique.fullgraph:
            options["guard_filter_fn"] = (
                _guards_of_arguments if technique.dynamic else lambda guards: [False] * len(guards)
            )
        self._compiled = torch.compile(
            _with_own_code(name, function),
            fullgraph=technique.fullgraph,
            dynamic=technique.dynamic,
            backend=technique.backend,
            options=options,
        )

    def __call__(self, *arguments: Any) -> Any:
        if self._made_for is None:
            return self._first_call(*arguments)
        if not self._technique.dynamic:
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
        if graphs == 0 or (self._technique.fullgraph and graphs != 1):
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
