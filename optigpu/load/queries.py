"""The queries of a load, when they are sent, and the schedules that MLPerf's scenarios make of them.

Source: Reddi et al., MLPerf Inference Benchmark, 2019, arXiv:1911.02549. `closed` and `trace` are none of MLPerf's.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from optigpu.documents.fields import parse_json, refusing
from optigpu.documents.rounds import ScenarioName
from optigpu.vocabulary import Frozen, SpecError

OPEN: tuple[ScenarioName, ...] = ("Server", "trace")
"""The scenarios whose queries arrive whether or not earlier ones have ended."""

Span = tuple[int, int]
"""The least and the most of a number."""


@dataclass(frozen=True)
class Query:
    """One request: its number from 0, when it is to be sent (or, later, its client is free), in seconds from the
    begin, and its lengths in tokens. Prompts whose first `blocks` are the same begin with the same tokens.

    One turn of a conversation is sent when that of the number `after` has ended. `texts` are what was said before it,
    and the answer last: its lengths, and the ids of its `prompt`, are known once these are `encoded`."""

    number: int
    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    blocks: tuple[int, ...] = ()
    after: int | None = None
    texts: tuple[str, ...] = ()
    prompt: tuple[int, ...] = ()

    def encoded(self, encode: Callable[[str], Sequence[int]]) -> "Query":
        """With the ids of its texts; as it is without any. An answer of one token counts as two."""
        if not self.texts:
            return self
        ids = [tuple(encode(text)) for text in self.texts]
        *said, answer = [each if len(each) > 1 else (*each, *each) or (0, 0) for each in ids]
        prompt = tuple(token for each in said for token in each)
        return replace(self, prompt_tokens=len(prompt), new_tokens=len(answer), texts=(), prompt=prompt)


@dataclass(frozen=True)
class Load:
    """The queries of one run, in the order of their arrival. `clients` None: each is sent at its moment, however many
    are under way. Otherwise so many clients send one after the other, each as soon as its last one has ended."""

    queries: tuple[Query, ...]
    clients: int | None = None

    @property
    def first(self) -> tuple[Query, ...]:
        """Those that wait for no other."""
        return tuple(query for query in self.queries if query.after is None)

    @property
    def following(self) -> Mapping[int, Query]:
        """The next turn, by the number of the one before."""
        return {query.after: query for query in self.queries if query.after is not None}


def go_on(prompts: Sequence[list[int]], before: Query, tokens: Sequence[int], query: Query) -> None:
    """Puts the answer that was given before into the prompt of the next turn, in the place of the recorded one; not
    where its tokens are unknown."""
    if len(tokens) == before.new_tokens:
        begin = [*prompts[before.number], *tokens]
        prompts[query.number][: len(begin)] = begin


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


ANSWERING = ("gpt", "assistant", "chatgpt", "model", "bing", "bard")


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True)  # whatever else others write of a message
    who: str = Field(alias="from")
    value: str


class ShareGPTLine(Frozen):
    """One conversation as ShareGPT has it, after `tools` and `system`: each answer in it is a request."""

    id: JsonValue = None
    tools: JsonValue = None
    system: str = ""
    conversations: tuple[_Said, ...] = Field(min_length=1, strict=False)

    def turns(self, number: int) -> list[Query]:
        """The requests of the conversation, whose first has this number."""
        tools = self.tools if isinstance(self.tools, str) else json.dumps(self.tools) if self.tools else ""
        said, found = [text for text in (tools, self.system) if text], list[Query]()
        for each in self.conversations:
            if said and each.who in ANSWERING:
                place = number + len(found)
                texts = (*said, each.value)
                found.append(Query(place, 0.0, 1, 2, after=place - 1 if found else None, texts=texts))
            said.append(each.value)
        if not found:
            raise SpecError(f"no answer follows a question; answers are from {', '.join(ANSWERING)}.")
        return found


def _kind_of(line: object) -> type[TraceLine | MooncakeLine | GuideLLMLine | ShareGPTLine]:
    fields = line if isinstance(line, Mapping) else {}
    if "conversations" in fields:
        return ShareGPTLine
    if "timestamp" in fields:
        return MooncakeLine
    return GuideLLMLine if "prompt_tokens_count" in fields else TraceLine


def read_trace(text: str) -> tuple[Query, ...]:
    """The queries of a trace in the order of arrival: JSON lines of arrival_s, prompt_tokens and output_tokens, or
    Mooncake's, GuideLLM's or ShareGPT's, the last also as one array. Empty lines are passed over. Raises SpecError that
    names the first line that is not one."""
    queries: list[Query] = []
    for number, line in _lines(text):
        with _naming(number):
            kind = _kind_of(line)
            with refusing(kind):
                read = kind.model_validate(line)
            if isinstance(read, ShareGPTLine):
                queries += read.turns(len(queries))
                continue
            query = read.query(len(queries))
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


def _lines(text: str) -> Iterator[tuple[int, object]]:
    """What each line holds, or each element where the text is an array, with its number from 1."""
    if text.lstrip().startswith("["):
        whole = parse_json(text.encode(errors="surrogatepass"), "the trace")
        yield from enumerate(whole if isinstance(whole, list) else (), 1)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            with _naming(number):
                parsed = parse_json(line.encode(errors="surrogatepass"), "it")
            yield number, parsed


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Errors in the block name the line."""
    try:
        yield
    except SpecError as error:
        why = "; ".join(str(error).splitlines())
        raise SpecError(f"line {number} of the trace is wrong: {why}") from None


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
