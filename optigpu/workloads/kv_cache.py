"""kv_cache: what a token costs at a position of its sequence."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.facts import ModelFacts
from optigpu.workloads.base import DecodeShape, Workload
from optigpu.workloads.requests import DecodingRequest, exceeds_context

Position = Annotated[int, Field(ge=1, le=131072)]


class KvCachePositions(Workload):
    """A few tokens decoded after a prompt as long as the position, for each of `positions`; the prompt is not counted.

    With a cache a token costs what reading the weights and the cache costs; without one (no_kv_cache) the whole
    sequence is computed again for each token. The timed tokens are at `position` and the `new_tokens` - 2 positions
    after it.
    """

    summary: ClassVar[str] = "time of a token against its position in the sequence"
    primary: ClassVar[str] = "tpot_s"
    metrics: ClassVar[tuple[str, ...]] = ("tpot_s", "tokens_per_s")
    lists: ClassVar[tuple[str, ...]] = ("positions",)

    kind: Literal["kv_cache"] = "kv_cache"
    positions: tuple[Position, ...] = Field(
        (32, 128, 256, 448),
        min_length=1,
        max_length=16,
        description="Positions in the sequence at which tokens are timed.",
    )
    new_tokens: int = Field(16, ge=2, le=1024, description="How many tokens to decode.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")

    @property
    def label(self) -> str:
        return f"position {'/'.join(map(str, self.positions))}"

    @property
    def generated_tokens(self) -> int:
        return self.new_tokens * self.batch_size

    @property
    def work_shape(self) -> DecodeShape:
        (position,) = self.positions
        return DecodeShape(position, self.new_tokens, self.batch_size, units=1)

    def check(self, model: ModelFacts) -> str | None:
        return exceeds_context(model, max(self.positions) + self.new_tokens, "position + new_tokens")

    def prepare(self, runtime: DecodingRuntime) -> DecodingRequest:
        (position,) = self.positions
        return DecodingRequest(runtime, (self.batch_size, position), self.new_tokens, self.metrics)
