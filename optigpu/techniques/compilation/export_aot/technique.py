"""export_aot: the decode step exported as a graph and compiled ahead of time into a library that needs no Python."""

import copy
import functools
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.surgery.step_arguments import MadeFor, cache_tensors, is_filled, made_for, require_same
from optigpu.techniques.base import Choice, Notes, Phase, Step, Technique
from optigpu.techniques.compilation.export_aot.package import load_package
from optigpu.vocabulary import DeviceKind, Layer, UnsupportedError


class ExportAot(Technique):
    """Exports the decode step with torch.export, compiles it with AOTInductor, and decodes in a lean greedy loop.

    The library reads the model's weights and writes the static cache where they are, so nothing is there twice. It is
    kept in the cache folder: the next process with the same graph finds it there.
    """

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    summary: ClassVar[str] = (
        "the decode step compiled ahead of time into a library without Python, kept for next time"
    )
    citation: ClassVar[str] = (
        "PyTorch documentation, torch.export and AOTInductor (since torch 2.6, 2025); Ansel et al., PyTorch 2, ASPLOS "
        "2024, doi:10.1145/3620665.3640366"
    )
    expected: ClassVar[str] = (
        "the speed of torch_compile or a little more, since no guard and no Python is left in the step; the next "
        "process with the same graph finds the library and does not compile; no second copy of the weights"
    )
    requires: ClassVar[tuple[str, ...]] = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "an exported decode step needs a cache",
        "autocast": "torch.export leaves autocast out of the graph",
        "grad_enabled": "an exported step keeps no gradients",
        "cpu_offload": "an exported step knows where its weights lie",
    }
    choices: ClassVar[tuple[Choice, ...]] = (Choice.STEP,)

    name: Literal["export_aot"] = "export_aot"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """AOTInductor writes C++ around its kernels, on CUDA too."""
        if environment.compiler is None:
            return "AOTInductor needs a C++ compiler and there is none; install g++."
        return None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It excludes torch_compile, which a default ladder tries."""
        return False

    def step(self, step: Step, notes: Notes) -> Step:
        """The step as a library."""
        return _ExportedStep(step, notes)


class _ExportedStep:
    """Exports and compiles at its first call, and takes that batch and that cache alone from then on."""

    def __init__(self, step: Any, notes: Notes) -> None:
        self._step = step
        self._notes = notes
        self._made_for: MadeFor | None = None
        self._run: Any = None

    def __call__(self, tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
        if not is_filled(cache):
            made: tuple[Any, Any] = self._step(tokens, position, cache)  # which makes the cache's tensors
            return made
        if self._made_for is None:
            self._run = self._library(tokens, position, cache)
            self._made_for = made_for(tokens, position, cache)
        require_same("export_aot", self._made_for, tokens, position, cache)
        next_tokens, logits = self._run([tokens, position])
        return next_tokens, logits

    def _library(self, tokens: Any, position: Any, cache: Any) -> Any:
        """Raises UnsupportedError when the step cannot be exported or compiled here."""
        import torch

        started = time.perf_counter()
        try:
            module = _bound_class()(self._step, cache)
            exported = torch.export.export(module, (tokens, position), strict=False)
        except (RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedError(f"torch.export cannot make one graph of this model: {why}.") from error
        exported_s = time.perf_counter() - started
        package = load_package(exported)
        self._notes.record(
            aot_export_s=exported_s,
            aot_build_s=package.build_s,
            aot_load_s=package.load_s,
            aot_cache_hit=package.hit,
            aot_library_bytes=package.size_bytes,
        )
        return package.run


@functools.cache
def _bound_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch
    from torch.utils._pytree import tree_map_only

    class Bound(torch.nn.Module):
        """A step with its cache as buffers: the graph then writes them in place, instead of copies."""

        def __init__(self, step: Any, cache: Any) -> None:
            super().__init__()
            self.model = step.model
            self._step = step
            self._cache = copy.copy(cache)
            self._cache.layers = [copy.copy(layer) for layer in cache.layers]
            self._kept = [dict(vars(layer)) for layer in cache.layers]
            self._names = {id(tensor): f"cache_{index}" for index, tensor in enumerate(cache_tensors(cache))}
            for tensor in cache_tensors(cache):
                self.register_buffer(self._names[id(tensor)], tensor)

        def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for layer, kept in zip(self._cache.layers, self._kept, strict=True):
                vars(layer).update(tree_map_only(torch.Tensor, self._buffer, kept))
            next_tokens, logits = self._step(tokens, position, self._cache)
            return next_tokens, logits

        def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
            """What stands for a tensor of the cache while the graph is traced."""
            buffer: torch.Tensor = getattr(self, self._names[id(tensor)])
            return buffer

    return Bound
