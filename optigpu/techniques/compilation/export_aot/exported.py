"""A decode step that is exported and compiled at its first call."""

import copy
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import Cache

from optigpu.surgery.compile_times import MadeFor, cache_tensors, is_filled, made_for, require_same
from optigpu.techniques.base import Notes
from optigpu.techniques.compilation.export_aot.package import Run, load_package
from optigpu.vocabulary import UnsupportedError


class ExportedStep:
    """Exports and compiles at its first call; later calls need the same batch size and the same cache."""

    def __init__(self, step: Any, notes: Notes) -> None:
        self._step = step
        self._notes = notes
        self._made_for: MadeFor | None = None
        self._run: Run | None = None

    def __call__(
        self, tokens: torch.Tensor, position: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_filled(cache):
            made: tuple[torch.Tensor, torch.Tensor] = self._step(
                tokens, position, cache
            )  # allocates the cache's tensors
            return made
        if self._made_for is None or self._run is None:
            self._run = self._library(tokens, position, cache)
            self._made_for = made_for(tokens, position, cache)
        require_same("export_aot", self._made_for, tokens, position, cache)
        next_tokens, logits = self._run([tokens, position])
        return next_tokens, logits

    def _library(self, tokens: torch.Tensor, position: torch.Tensor, cache: Cache) -> Run:
        """Raises UnsupportedError when the step cannot be exported or compiled here."""
        started = time.perf_counter()
        try:
            module = StepWithCache(self._step, cache)
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


class StepWithCache(torch.nn.Module):
    """A step with its cache as buffers: the graph then writes them in place, instead of copies."""

    def __init__(self, step: Any, cache: Cache) -> None:
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
        """The buffer in place of a tensor of the cache while the graph is traced."""
        buffer: torch.Tensor = getattr(self, self._names[id(tensor)])
        return buffer
