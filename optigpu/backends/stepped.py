"""What workloads and meters ask of an engine that gives logits step by step."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.engine import DecodingEngine
from optigpu.backends.runtime import Generation, Ids, Logits
from optigpu.documents.facts import Footprint, ModelFacts, WeightFacts
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError


class Steps(Protocol):
    """`rows` sequences of at most `length` tokens that an engine decodes together."""

    rows: int
    length: int

    def begin(self) -> None:
        """Forgets the sequences."""

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count] to the sequences, which have room for them. Logits after the last token of
        each, [rows, vocabulary], which may lie in the engine's memory, and are valid until the next call.
        """

    def close(self) -> None:
        """Gives the memory of the sequences back."""


class SteppedRuntime(DecodingEngine):
    """A DecodingRuntime of an engine on a CPU. Sequences are made by the first request, and anew for larger ones."""

    def __init__(
        self,
        order: Order,
        notes: Notes,
        *,
        engine: str,
        facts: ModelFacts,
        steps: Callable[[int, int], Steps],
        weights: WeightFacts,
        footprint: Footprint | None,
    ) -> None:
        """`steps` makes the sequences for so many rows and so many tokens."""
        self.device, self.seed, self.notes = order.device, order.seed, notes
        self.engine, self.facts = engine, facts
        self._made, self._weights, self._footprint = steps, weights, footprint
        self._steps: Steps | None = None

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; the first of the gaps is that of the prompt's pass."""
        rows, length = prompt.shape[0], prompt.shape[1] + new_tokens
        steps = self._steps_for(rows, length)
        self._remember(rows, length)
        tokens = np.empty((rows, new_tokens), np.int64)
        marks = [time.perf_counter_ns()]
        steps.begin()
        inputs = prompt
        for step in range(new_tokens):
            inputs = tokens[:, step : step + 1] = steps.forward(inputs).argmax(axis=1, keepdims=True)
            marks.append(time.perf_counter_ns())
        return Generation(tokens, [gap / 1e9 for gap in np.diff(marks).tolist()])

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Token by token after a prompt of `prefill` tokens."""
        for logits in self._scored(tokens, prefill):
            yield logits.copy()

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Without the copies of the logits."""
        self._steps_for(tokens.shape[0], tokens.shape[1])
        started = time.perf_counter_ns()
        for _ in self._scored(tokens, prefill):
            pass
        return (time.perf_counter_ns() - started) / 1e9

    def _scored(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        rows, length = tokens.shape
        steps = self._steps_for(rows, length)
        self._remember(rows, length + 1)  # the last token predicts one more
        steps.begin()
        if prefill:
            steps.forward(tokens[:, :prefill])
        for position in range(prefill, tokens.shape[1]):
            yield steps.forward(tokens[:, position : position + 1])

    def _steps_for(self, rows: int, length: int) -> Steps:
        if length > self.facts.longest:
            raise OptiGPUError(
                f"The model's context is {self.facts.longest} tokens, and {length} do not fit; ask for fewer tokens."
            )
        known = self._steps
        if known is None or known.rows != rows or known.length < length:
            if known is not None:
                known.close()
                self._steps = None
            known = self._steps = self._made(rows, length)
        return known
