"""prefill: the pass over a prompt by itself, up to the first token."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from optigpu.backends.runtime import PromptRuntime
from optigpu.documents.facts import ModelFacts
from optigpu.vocabulary import Task
from optigpu.workloads.base import PrefillShape, Workload
from optigpu.workloads.requests import PassRequest, drawn_ids, exceeds_context


class Prefill(Workload):
    """One forward pass over `prompt_tokens` random tokens for each of a batch, into an empty cache; nothing is decoded.

    The first token is chosen within the pass's time, so that it ends when a reader would see something.
    """

    summary: ClassVar[str] = "one pass over a prompt into an empty cache, up to the first token"
    primary: ClassVar[str] = "prefill_tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("prefill_tokens_per_s", "ttft_s", "latency_s")
    whole: ClassVar[str | None] = "latency_s"
    task: ClassVar[Task] = Task.PREFILL

    kind: Literal["prefill"] = "prefill"
    prompt_tokens: int = Field(512, ge=1, le=131072, description="Length of the prompt in tokens.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")

    @property
    def work_shape(self) -> PrefillShape:
        tokens = self.batch_size * self.prompt_tokens
        return PrefillShape(self.prompt_tokens, self.batch_size, units=tokens)

    def check(self, model: ModelFacts) -> str | None:
        return exceeds_context(model, self.prompt_tokens, "prompt_tokens")

    def prepare(self, runtime: PromptRuntime) -> PassRequest:
        shape = (self.batch_size, self.prompt_tokens)
        expected = (self.batch_size, runtime.facts.vocabulary)
        tokens = self.batch_size * self.prompt_tokens

        def metrics(seconds: float) -> Mapping[str, float]:
            return {"prefill_tokens_per_s": tokens / seconds, "ttft_s": seconds, "latency_s": seconds}

        return PassRequest(runtime, lambda source: drawn_ids(source, runtime.facts, shape), expected, metrics)
