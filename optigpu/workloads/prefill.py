"""prefill: the pass over a prompt by itself, up to the first token."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from optigpu.backends.runtime import PromptRuntime
from optigpu.documents.shapes import ModelFacts
from optigpu.vocabulary import Task
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.decoding import drawn_ids, exceeds_context
from optigpu.workloads.requests.passes import PassRequest
from optigpu.workloads.requests.shapes import PrefillShape


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
        """A pass is over the prompts of the whole batch."""
        tokens = self.batch_size * self.prompt_tokens
        return PrefillShape(self.prompt_tokens, self.batch_size, units=tokens)

    def check(self, model: ModelFacts) -> str | None:
        """The prompt must fit the model's context."""
        return exceeds_context(model, self.prompt_tokens, "prompt_tokens")

    def prepare(self, runtime: PromptRuntime) -> PassRequest:
        """Draws the prompts from the runtime's seed."""
        shape = (self.batch_size, self.prompt_tokens)
        expected = (self.batch_size, runtime.facts.vocabulary)
        return PassRequest(
            runtime, lambda source: drawn_ids(source, runtime.facts, shape), expected, self._metrics
        )

    def _metrics(self, seconds: float) -> Mapping[str, float]:
        tokens = self.batch_size * self.prompt_tokens
        return {"prefill_tokens_per_s": tokens / seconds, "ttft_s": seconds, "latency_s": seconds}
