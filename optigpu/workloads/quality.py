"""quality: what a stack costs in quality, by itself; what is timed is the scoring of text."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from optigpu.models.facts import ModelFacts
from optigpu.workloads.base import Check, DecodingRuntime, Workload
from optigpu.workloads.requests.decoding import exceeds_context


class Quality(Workload):
    """The stack's predictions of given text, token by token through the decode step, in windows of `window` tokens.

    The quality meter compares them with those of the fp32 model on the text that `measure.quality` names; its windows
    are at most as long as these. What is timed are windows of random tokens, since a step takes equally long for all:
    the first `prefill` tokens at once, then one step for each further token but the last, which predicts nothing.
    """

    summary: ClassVar[str] = "what a stack costs in quality: text scored token by token"
    primary: ClassVar[str] = "scored_tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("scored_tokens_per_s", "latency_s")
    example_model: ClassVar[str] = "bundled:tiny"
    meters: ClassVar[tuple[str, ...]] = ("quality",)

    kind: Literal["quality"] = "quality"
    window: int = Field(128, ge=16, le=131072, description="Length of a window of text in tokens.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")

    def check(self, model: ModelFacts) -> str | None:
        """A window must fit the model's context."""
        return exceeds_context(model, self.window, "window")

    def prepare(self, runtime: DecodingRuntime) -> "ScoringRequest":
        """Draws the tokens from the runtime's seed."""
        import torch

        source = torch.Generator().manual_seed(runtime.seed)
        return ScoringRequest(runtime, source, (self.batch_size, self.window))


PREFILL = 8
"""Tokens of a window that are its prompt; what is timed begins after one."""


class ScoringRequest:
    """The same windows, scored again and again."""

    def __init__(self, runtime: DecodingRuntime, source: Any, shape: tuple[int, int]) -> None:
        """`source` is the torch generator that the tokens, int64 of `shape` [batch, window], are drawn from."""
        import torch

        self._runtime, self._source, self._shape = runtime, source, shape
        tokens = torch.randint(runtime.facts.vocabulary, shape, generator=source)
        self._tokens = tokens[:, :-1].to(runtime.device.value)

    def run(self) -> Mapping[str, float]:
        """One timed window, the prompt's pass included."""
        latency_s, predicted, _ = self._scored()
        return {"scored_tokens_per_s": predicted * self._shape[0] / latency_s, "latency_s": latency_s}

    def check(self) -> Check:
        """Counts the predictions, and looks at every logit for NaN and infinity."""
        latency_s, predicted, wrong = self._scored(look=True)
        expected = self._tokens.shape[1] - PREFILL
        if predicted != expected:
            return Check(latency_s, f"Scoring gave {predicted} predictions instead of {expected}.")
        if wrong:
            return Check(latency_s, f"{wrong} logits of a window are NaN or infinite.")
        return Check(latency_s)

    def observe(self) -> None:
        """Records which kernels run."""
        self._runtime.observe(self._tokens[:, :PREFILL])

    def described(self) -> Mapping[str, Sequence[float]]:
        """Without a cache all predictions come at once, so none has a time of its own."""
        return {}

    def fresh(self) -> "ScoringRequest":
        """The next windows of the same source."""
        return ScoringRequest(self._runtime, self._source, self._shape)

    def _scored(self, look: bool = False) -> tuple[float, int, int]:
        """Seconds of a window, how many tokens of a row were predicted, and how many logits are wrong, if asked for."""
        clock, predicted, wrong = self._runtime.clock, 0, 0
        marks = [clock.mark()]
        for logits in self._runtime.score(self._tokens, PREFILL):
            predicted += 1
            if look:
                wrong += int((~logits.isfinite()).sum())
        marks.append(clock.mark())
        return clock.seconds(marks)[0], predicted, wrong
