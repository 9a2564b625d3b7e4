"""`python -m benchmarks.peers.llama_cpp_loop`: llama.cpp on the same weights, by its own C interface."""

import argparse
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.arguments import parse, serve
from optigpu.backends.llama_cpp.gguf_cache import TYPES, kept
from optigpu.backends.llama_cpp.model import LlamaCppModel


class LlamaCppLoop:
    """A bare greedy loop around llama.cpp's decode."""

    def __init__(self, options: argparse.Namespace) -> None:
        path = kept(options.cache, options.model, options.weights, options.seed, options.threads)
        self._model = LlamaCppModel(path, options.length, options.threads)
        self.vocabulary = self._model.vocabulary
        self.weight_bytes = self._model.weight_bytes
        self.details = self._model.details

    def decode_rate(self, prompt: Sequence[int], new_tokens: int) -> float:
        """tokens/s after the first token."""
        self._model.begin()
        token = self._next(prompt)
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = self._next([token])
        return (new_tokens - 1) / (time.perf_counter() - started)

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Tokens of the prompt by the seconds until the first token is chosen."""
        started = time.perf_counter()
        self._model.begin()
        self._next(prompt)
        return len(prompt) / (time.perf_counter() - started)

    def score(self, tokens: Sequence[int], prefill: int) -> Iterator[NDArray[np.float32]]:
        """Logits after each of `tokens` from index `prefill` on, token by token after a prompt of `prefill`."""
        self._model.begin()
        self._model.forward(tokens[:prefill])
        for token in tokens[prefill:]:
            yield self._model.forward([token]).copy()

    def _next(self, tokens: Sequence[int]) -> int:
        return int(self._model.forward(tokens).argmax())


if __name__ == "__main__":
    serve(LlamaCppLoop, parse(__doc__, tuple(TYPES)))
