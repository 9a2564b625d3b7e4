"""torch_compile: the decode step, or a whole forward pass, as one compiled graph."""

import itertools
import re
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.surgery.step_arguments import MadeFor, made_for, require_same
from optigpu.techniques.base import ON_MODELS, Choice, Forward, Notes, Phase, Step, Technique
from optigpu.techniques.compilation.torch_compile.compile_times import compile_times
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

MANY_RECOMPILES = 256
"""With graph breaks a layer is a graph of its own, and torch's limit of 8 would run the ninth in the interpreter."""


class TorchCompile(Technique):
    """Compiles the decode step and decodes in a lean greedy loop around it; without decoding, the forward pass.

    With `fullgraph` a graph break is an error, without it breaks are counted. With `dynamic` batch and length may
    change: one graph serves them all, but for batches of one, which torch gives a graph of their own. `backend` says
    who makes code of the graph: "inductor" writes kernels, "aot_eager" and "eager" run the captured graph operator by
    operator, which shows what capturing alone buys, and "cudagraphs" records those operators on CUDA.
    """

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = (
        "the decode step as one graph of fused kernels, in a lean greedy loop; without decoding, the forward pass"
    )
    citation: ClassVar[str] = "Ansel et al., PyTorch 2, ASPLOS 2024, doi:10.1145/3620665.3640366"
    expected: ClassVar[str] = "1.3x to 3x at batch 1, where the interpreter's overhead dominates"
    requires: ClassVar[tuple[str, ...]] = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {"no_kv_cache": "a compiled decode step needs a cache"}
    choices: ClassVar[tuple[Choice, ...]] = (Choice.STEP,)
    later: ClassVar[tuple[str, ...]] = ("dynamic", "fullgraph", "backend")

    name: Literal["torch_compile"] = "torch_compile"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool = False
    fullgraph: bool = True
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backend != "inductor" and self.mode != "default":
            raise ValueError(f"mode {self.mode} is for the backend inductor: leave mode out")
        if self.backend == "cudagraphs" and self.dynamic:
            raise ValueError("the backend cudagraphs records fixed shapes: leave dynamic out")
        return self

    def chosen(self) -> tuple[Choice, ...]:
        """Some modes record CUDA graphs by themselves."""
        records = self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"
        return (*self.choices, Choice.CAPTURE) if records else self.choices

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """TorchInductor writes C++ for a CPU and needs a compiler there."""
        if self.backend == "cudagraphs" and device is not DeviceKind.CUDA:
            return "torch_compile: the backend cudagraphs is for CUDA; ask for the backend inductor."
        if self.backend == "inductor" and device is DeviceKind.CPU and environment.compiler is None:
            return "TorchInductor needs a C++ compiler on a CPU and there is none; install g++."
        return None

    def step(self, step: Step, notes: Notes) -> Step:
        """The step as one graph."""
        return _Compiled(self, "decode_step", step, notes)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        """The pass as one graph."""
        return _Compiled(self, "forward_pass", forward, notes)


class _Compiled:
    """Compiles at its first call and makes sure that it did; unless `dynamic`, it then takes such arguments alone.

    A step has some 800 guards (235 tensors for GPT-2), and looking at them takes a tenth of the step on a CPU. One
    look at the shape and the cache says as much, because nothing else changes in a measuring process. What is dynamic
    is guarded by the shapes of its arguments, and what has breaks by all guards: they tell its layers apart.
    """

    def __init__(
        self, technique: TorchCompile, name: str, function: Callable[..., Any], notes: Notes
    ) -> None:
        import torch

        if technique.backend == "inductor":
            _require_headers()
        if not technique.fullgraph:
            torch._dynamo.config.recompile_limit = MANY_RECOMPILES
        if technique.dynamic:
            # Or a batch of two and two heads would be one size, and the graph would hold for both or for none.
            torch.fx.experimental._config.use_duck_shape = False
        self._technique = technique
        self._notes = notes
        self._made_for: MadeFor | None = None
        self._compiled = torch.compile(
            _with_own_code(name, function),
            fullgraph=technique.fullgraph,
            dynamic=technique.dynamic,
            backend=technique.backend,
            options=_options(technique),
        )

    def __call__(self, *arguments: Any) -> Any:
        import torch

        if self._made_for is None:
            return self._first_call(*arguments)
        if not self._technique.dynamic:
            require_same("torch_compile", self._made_for, *arguments)
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(*arguments)

    def _first_call(self, *arguments: Any) -> Any:
        from torch._dynamo.exc import Unsupported

        before = compile_times()
        try:
            result = self._compiled(*arguments)
        except Unsupported as error:
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedError(
                f"torch_compile cannot make one graph of this model ({why}); ask for fullgraph false."
            ) from error
        times = compile_times().since(before)
        if times.graphs == 0 or (self._technique.fullgraph and times.graphs != 1):
            raise UnsupportedError(
                f"torch.compile made {times.graphs} graphs and not one; is it disabled by the environment?"
            )
        self._made_for = made_for(*arguments)
        self._notes.record(**times.facts())
        return result


def _options(technique: TorchCompile) -> dict[str, Any]:
    import torch

    options = torch._inductor.list_mode_options(technique.mode) if technique.backend == "inductor" else {}
    if not technique.fullgraph:
        return options
    return options | {"guard_filter_fn": _guards_of_arguments if technique.dynamic else _no_guards}


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _guards_of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Those whose name begins with an argument, as in "cache.layers[0].keys", and that on how shapes relate."""
    return [
        guard.guard_type == "SHAPE_ENV" or re.split(r"\W", guard.name, maxsplit=1)[0] in _ARGUMENTS
        for guard in guards
    ]


_ARGUMENTS = {"tokens", "position", "cache", "inputs"}


def _with_own_code(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a code object of its own: what torch.compile made is found again by that alone."""

    def decode_step(tokens: Any, position: Any, cache: Any) -> Any:
        return function(tokens, position, cache)

    def forward_pass(inputs: Any) -> Any:
        return function(inputs)

    own = {"decode_step": decode_step, "forward_pass": forward_pass}[name]
    code = own.__code__.replace(co_name=f"{name}_{next(_NUMBERS)}")
    return types.FunctionType(code, globals(), code.co_name, None, own.__closure__)


_NUMBERS = itertools.count()


def _require_headers() -> None:
    """Raises UnsupportedError where TorchInductor's launchers cannot be built."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise UnsupportedError(f"TorchInductor needs Python's headers and {header} is missing; install them.")
