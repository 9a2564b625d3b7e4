"""generate: decoding of a batch of prompts, prefill and decode reported apart."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optigpu.backends.runtime import DecodingRuntime, Sampling
from optigpu.documents.facts import ModelFacts
from optigpu.workloads.base import DecodeShape, Workload, WorkShape
from optigpu.workloads.requests import (
    METRICS,
    Decode,
    DecodingRequest,
    TextRequest,
    exceeds_context,
    text_runtime,
)

Tokens = Annotated[int, Field(ge=1, le=131072)]
PROMPT_TOKENS = 128


class Generate(Workload):
    """Decoding of exactly `new_tokens` tokens after a prompt, for each of a batch.

    The prompt is `prompt_tokens` random tokens, or the text `prompt`, the same for each of the batch. Each token is the
    most likely one; with a `temperature` above 0 it is drawn, with the job's seed, from the most likely ones that
    together have a probability of `top_p`, and the drawing is part of the step's time. The result keeps the text that
    follows a text. Quality is not affected by either: it is measured on given tokens.
    """

    summary: ClassVar[str] = "text generation, greedy or sampled, prefill and decode reported apart"
    primary: ClassVar[str] = "tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = METRICS
    whole: ClassVar[str | None] = "latency_s"
    later: ClassVar[tuple[str, ...]] = ("prompt", "temperature", "top_p")

    kind: Literal["generate"] = "generate"
    prompt_tokens: Tokens | None = Field(
        PROMPT_TOKENS,
        description="Length of the prompt in tokens; null with a text, whose length follows from it.",
    )
    new_tokens: int = Field(128, ge=2, le=131072, description="How many tokens to decode.")
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")
    prompt: str | None = Field(
        None,
        min_length=1,
        max_length=20_000,
        description="A text to go on from, instead of random tokens; its length follows from it.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Draw tokens at this temperature, with the job's seed; 0 takes the most likely.",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the most likely tokens that together have this probability."
    )

    @model_validator(mode="before")
    @classmethod
    def _length_of_a_text(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("prompt") is not None:
            return {"prompt_tokens": None} | dict(given)
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("prompt_tokens follows from prompt; name one of the two")
        if self.top_p < 1 and not self.temperature:
            raise ValueError("top_p needs a temperature above 0, such as 1; name one or leave top_p out")
        return self

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        return {name: value for name, value in found.items() if name != "prompt_tokens" or value is not None}

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0

    @property
    def has_text(self) -> bool:
        return self.prompt is not None

    @property
    def scenario(self) -> Literal["SingleStream", "Offline"]:
        """The scenario of MLPerf Inference: one query after the other, or all queries at once.

        A single stream is judged by the 90th percentile of its latency, an offline batch by its samples per second.
        Source: Reddi et al., MLPerf Inference Benchmark, 2019, arXiv:1911.02549.
        """
        return "SingleStream" if self.batch_size == 1 else "Offline"

    @property
    def generated_tokens(self) -> int:
        return self.new_tokens * self.batch_size

    @property
    def work_shape(self) -> DecodeShape | None:
        """A step gives one token of each sequence. None for a text, whose length only a run knows."""
        return None if self.prompt_tokens is None else self._shape(self.prompt_tokens)

    def shape_after(self, prompt_tokens: int | None) -> WorkShape | None:
        """The same after a text of so many tokens."""
        return self.work_shape or (self._shape(prompt_tokens) if prompt_tokens else None)

    def _shape(self, prompt_tokens: int) -> DecodeShape:
        return DecodeShape(prompt_tokens, self.new_tokens, self.batch_size, units=self.batch_size)

    def check(self, model: ModelFacts) -> str | None:
        if self.prompt_tokens is None:  # a text has a token at least
            return exceeds_context(model, 1 + self.new_tokens, "prompt + new_tokens")
        return exceeds_context(model, self.prompt_tokens + self.new_tokens, "prompt_tokens + new_tokens")

    def prepare(self, runtime: DecodingRuntime) -> DecodingRequest:
        """Draws the prompts from the runtime's seed, or has the tokenizer read the text. Raises UnsupportedError for
        an engine that cannot read or sample, and a text that is too long."""
        runtime.notes.record(scenario=self.scenario)
        decode: Decode | None = None
        if self.is_sampled:
            sampling = Sampling(self.temperature, self.top_p, runtime.seed)
            runtime.notes.record(sampling=asdict(sampling))
            decode = partial(text_runtime(runtime).draw, sampling=sampling)
        if self.prompt is not None:
            return TextRequest(text_runtime(runtime), self.prompt, self.batch_size, self.new_tokens, decode)
        assert self.prompt_tokens is not None  # one of the two is there
        return DecodingRequest(runtime, (self.batch_size, self.prompt_tokens), self.new_tokens, decode=decode)
