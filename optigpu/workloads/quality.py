"""quality: what a stack costs in quality, by itself; what is timed is the scoring of text."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.facts import ModelFacts
from optigpu.workloads.base import Check, Request, Workload
from optigpu.workloads.requests import Untouched, drawn_ids, exceeds_context


class Quality(Workload):
    """The stack's predictions of given text, token by token through the decode step, in windows of `window` tokens.

    The quality meter compares them with those of the fp32 model on the text that `measure.quality` names; its windows
    are at most as long as these. What is timed are windows of random tokens, since a step takes equally long for all:
    the first `prefill` tokens at once, then one step for each further token but the last, which predicts nothing.
    """

    summary: ClassVar[str] = "the quality of a stack: text scored token by token"
    primary: ClassVar[str] = "scored_tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("scored_tokens_per_s", "latency_s")
    whole: ClassVar[str | None] = "latency_s"
    example_model: ClassVar[str] = "bundled:tiny"
    meters: ClassVar[tuple[str, ...]] = ("quality",)

    kind: Literal["quality"] = "quality"
    window: int = Field(128, ge=16, le=131072, description="Length of a window of text in tokens.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")

    def check(self, model: ModelFacts) -> str | None:
        return exceeds_context(model, self.window, "window")

    def prepare(self, runtime: DecodingRuntime) -> "ScoringRequest":
        return ScoringRequest(runtime, runtime.seed, (self.batch_size, self.window))


PREFILL_TOKENS = 8
"""Tokens of a window that are its prompt; what is timed begins after one."""


class ScoringRequest(Request):
    """The same windows, scored repeatedly."""

    def __init__(
        self, runtime: DecodingRuntime, seed: int, shape: tuple[int, int], earlier: Untouched | None = None
    ) -> None:
        """Tokens of `shape` [batch, window] are drawn from `seed`; the last of each predicts nothing."""
        self._runtime, self._shape = runtime, shape
        drawn = drawn_ids(np.random.default_rng(seed), runtime.facts, shape)
        self._tokens = np.ascontiguousarray(drawn[:, :-1])
        self._untouched = Untouched(self._tokens, earlier)

    def run(self) -> Mapping[str, float]:
        latency_s = self._runtime.scoring_s(self._tokens, PREFILL_TOKENS)
        rate = self._expected * self._shape[0] / latency_s
        return {"scored_tokens_per_s": rate, "latency_s": latency_s}

    @property
    def _expected(self) -> int:
        return self._shape[1] - 1 - PREFILL_TOKENS

    def check(self) -> Check:
        latency_s = self._runtime.scoring_s(self._tokens, PREFILL_TOKENS)
        found = [
            int((~np.isfinite(each)).sum()) for each in self._runtime.score(self._tokens, PREFILL_TOKENS)
        ]
        if self._untouched.problem:
            return Check(latency_s, self._untouched.problem)
        if len(found) != self._expected:
            return Check(latency_s, f"Scoring gave {len(found)} predictions instead of {self._expected}.")
        if sum(found):
            return Check(latency_s, f"{sum(found)} logits of a window are NaN or infinite.")
        return Check(latency_s)

    def observe(self) -> None:
        self._runtime.observe(self._tokens[:, :PREFILL_TOKENS])

    def fresh(self, seed: int) -> "ScoringRequest":
        return ScoringRequest(self._runtime, seed, self._shape, self._untouched)
