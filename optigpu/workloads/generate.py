"""generate: greedy decoding of a batch of prompts, prefill and decode reported apart."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.shapes import ModelFacts
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.decoding import METRICS, DecodingRequest, exceeds_context
from optigpu.workloads.requests.shapes import DecodeShape

Tokens = Annotated[int, Field(ge=1, le=131072)]


class Generate(Workload):
    """Greedy decoding of exactly `new_tokens` tokens after `prompt_tokens` random ones, for each of a batch."""

    summary: ClassVar[str] = "greedy text generation, prefill and decode reported apart"
    primary: ClassVar[str] = "tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = METRICS

    kind: Literal["generate"] = "generate"
    prompt_tokens: Tokens = Field(128, description="Length of the prompt in tokens.")
    new_tokens: int = Field(128, ge=2, le=131072, description="How many tokens to decode.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")

    @property
    def scenario(self) -> Literal["SingleStream", "Offline"]:
        """The scenario of MLPerf Inference: one query after the other, or all queries at once.

        A single stream is judged by the 90th percentile of its latency, an offline batch by its samples per second.
        Source: Reddi et al., MLPerf Inference Benchmark, 2019, arXiv:1911.02549.
        """
        return "SingleStream" if self.batch_size == 1 else "Offline"

    @property
    def generated_tokens(self) -> int:
        """All sequences' together."""
        return self.new_tokens * self.batch_size

    @property
    def work_shape(self) -> DecodeShape:
        """A step gives one token of each sequence."""
        return DecodeShape(self.prompt_tokens, self.new_tokens, self.batch_size, units=self.batch_size)

    def check(self, model: ModelFacts) -> str | None:
        """Prompt and continuation must fit the model's context."""
        total = self.prompt_tokens + self.new_tokens
        return exceeds_context(model, total, "prompt_tokens + new_tokens")

    def prepare(self, runtime: DecodingRuntime) -> DecodingRequest:
        """Draws the prompts from the runtime's seed."""
        runtime.notes.record(scenario=self.scenario)
        return DecodingRequest(runtime, (self.batch_size, self.prompt_tokens), self.new_tokens)
