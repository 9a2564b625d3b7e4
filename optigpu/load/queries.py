"""The queries of a load, when they are sent, and the schedules that MLPerf's scenarios make of them.

Source: Reddi et al., MLPerf Inference Benchmark, 2019, arXiv:1911.02549. `closed` and `trace` are none of MLPerf's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from optigpu.documents.fields import parse_json, refusing
from optigpu.documents.load import ScenarioName
from optigpu.vocabulary import Frozen, SpecError

OPEN: tuple[ScenarioName, ...] = ("Server", "trace")
"""The scenarios whose queries arrive whether or not earlier ones have ended."""

Span = tuple[int, int]
"""The least and the most of a number."""


@dataclass(frozen=True)
class Query:
    """One request: its number from 0, when it is to be sent (or, later, its client is free), in seconds from the
    begin, and its lengths in tokens. Prompts whose first `blocks` are the same begin with the same tokens."""

    number: int
    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Load:
    """The queries of one run, in the order of their arrival. `clients` None: each is sent at its moment, however many
    are under way. Otherwise so many clients send one after the other, each as soon as its last one has ended."""

    queries: tuple[Query, ...]
    clients: int | None = None


BLOCK_TOKENS = 512
"""In Mooncake's traces, of what each of the hash_ids stands for."""
PromptTokens = Annotated[int, Field(ge=1, le=131_072)]
OutputTokens = Annotated[int, Field(ge=2, le=131_072)]


class TraceLine(Frozen):
    """One line of a trace."""

    arrival_s: float = Field(ge=0, le=86_400)
    prompt_tokens: PromptTokens
    output_tokens: OutputTokens

    def query(self, number: int) -> Query:
        """The request."""
        return Query(number, self.arrival_s, self.prompt_tokens, self.output_tokens)


class MooncakeLine(Frozen):
    """One line as Mooncake publishes them: `timestamp` is in milliseconds, and `hash_ids` name the prompt's blocks, so
    that turns of a conversation and system prompts share their beginning. Source: Qin et al., Mooncake, FAST 2025."""

    timestamp: float = Field(ge=0, le=86_400_000)
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), strict=False)

    def query(self, number: int) -> Query:
        """The request."""
        return Query(number, self.timestamp / 1e3, self.input_length, self.output_length, self.hash_ids)


class GuideLLMLine(Frozen):
    """One line of GuideLLM's data, of which the lengths count; all requests come at once."""

    prompt: str | None = None
    prompt_tokens_count: PromptTokens
    output_tokens_count: OutputTokens

    def query(self, number: int) -> Query:
        """The request."""
        return Query(number, 0.0, self.prompt_tokens_count, self.output_tokens_count)


def _kind_of(line: object) -> type[TraceLine | MooncakeLine | GuideLLMLine]:
    fields = line if isinstance(line, Mapping) else {}
    if "conversations" in fields:
        raise SpecError(
            "it holds texts, as ShareGPT's does; give the lengths in tokens of prompt and answer."
        )
    if "timestamp" in fields:
        return MooncakeLine
    return GuideLLMLine if "prompt_tokens_count" in fields else TraceLine


def read_trace(text: str) -> tuple[Query, ...]:
    """The queries of a trace in the order of arrival: JSON lines of arrival_s, prompt_tokens and output_tokens, or
    Mooncake's or GuideLLM's. Empty lines are passed over. Raises SpecError that names the first line that is not
    one."""
    queries: list[Query] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            parsed = parse_json(line.encode(errors="surrogatepass"), "it")
            kind = _kind_of(parsed)
            with refusing(kind):
                query = kind.model_validate(parsed).query(len(queries))
        except SpecError as error:
            why = "; ".join(str(error).splitlines())
            raise SpecError(f"line {number} of the trace is wrong: {why}") from None
        if queries and query.arrival_s < queries[-1].arrival_s:
            raise SpecError(
                f"line {number} of the trace arrives at {query.arrival_s:g} s, before the line above it at "
                f"{queries[-1].arrival_s:g} s; sort the lines by arrival_s."
            )
        queries.append(query)
    if not queries:
        raise SpecError(
            'the trace has no line; write one for each request, such as {"arrival_s": 0.5, "prompt_tokens": 64, '
            '"output_tokens": 32}.'
        )
    return tuple(queries)


@dataclass(frozen=True)
class Schedule:
    """What a scenario's runs are made of. `rate` is of the scenario Server and `clients` of closed. Lengths are drawn
    evenly between the ends of their spans. A `trace` says all of it."""

    scenario: ScenarioName
    count: int
    prompt_tokens: Span
    new_tokens: Span
    rate: float = 1.0
    clients: int = 1
    trace: tuple[Query, ...] = ()

    def draw(self, source: np.random.Generator) -> Load:
        """The next run's load."""
        if self.scenario == "trace":
            return Load(self.trace)
        arrivals_s = (
            poisson(self.rate, self.count, source) if self.scenario == "Server" else [0.0] * self.count
        )
        lengths = [
            source.integers(*span, size=self.count, endpoint=True).tolist()
            for span in (self.prompt_tokens, self.new_tokens)
        ]
        queries = map(Query, range(self.count), arrivals_s, *lengths)
        clients = {"SingleStream": 1, "closed": self.clients}.get(self.scenario)
        return Load(tuple(queries), clients)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a query can make, its prompt included."""
        if self.scenario == "trace":
            return max(query.prompt_tokens + query.new_tokens for query in self.trace)
        return self.prompt_tokens[1] + self.new_tokens[1]


def poisson(rate: float, count: int, source: np.random.Generator) -> list[float]:
    """When `count` queries of a Poisson process arrive, in seconds, in their order. The exponential gaps are scaled to
    fill count / rate seconds exactly, so that every run has its rate."""
    gaps = source.exponential(size=count + 1)
    moments: list[float] = (np.cumsum(gaps[:-1]) * (count / rate / math.fsum(gaps))).tolist()
    return moments
