"""batch_sweep: throughput against latency, over the size of the batch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.facts import ModelFacts
from optigpu.workloads.base import DecodeShape, Workload
from optigpu.workloads.requests import METRICS, DecodingRequest, exceeds_context

BatchSize = Annotated[int, Field(ge=1, le=1024)]


class BatchSweep(Workload):
    """Greedy decoding as in generate, for each of `batch_sizes`: more tokens a second, and a longer wait for each."""

    summary: ClassVar[str] = "greedy text generation in growing batches: throughput against latency"
    primary: ClassVar[str] = "tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    whole: ClassVar[str | None] = "latency_s"
    lists: ClassVar[tuple[str, ...]] = ("batch_sizes",)

    kind: Literal["batch_sweep"] = "batch_sweep"
    batch_sizes: tuple[BatchSize, ...] = Field(
        (1, 2, 4, 8), min_length=1, max_length=16, description="Batch sizes to measure."
    )
    prompt_tokens: int = Field(64, ge=1, le=131072, description="Length of the prompt in tokens.")
    new_tokens: int = Field(64, ge=2, le=131072, description="How many tokens to decode.")

    @property
    def label(self) -> str:
        return f"batch {'/'.join(map(str, self.batch_sizes))}"

    @property
    def generated_tokens(self) -> int:
        (size,) = self.batch_sizes
        return self.new_tokens * size

    @property
    def work_shape(self) -> DecodeShape:
        (size,) = self.batch_sizes
        return DecodeShape(self.prompt_tokens, self.new_tokens, size, units=size)

    def check(self, model: ModelFacts) -> str | None:
        total = self.prompt_tokens + self.new_tokens
        return exceeds_context(model, total, "prompt_tokens + new_tokens")

    def prepare(self, runtime: DecodingRuntime) -> DecodingRequest:
        (size,) = self.batch_sizes
        return DecodingRequest(runtime, (size, self.prompt_tokens), self.new_tokens)
