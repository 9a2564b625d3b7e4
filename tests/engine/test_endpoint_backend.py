"""Servers on an endpoint in this process: how they are asked, what comes of their streams, what is refused."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends.base import Order
from optigpu.backends.endpoint.prompts import Speller, tokenizer_of
from optigpu.backends.endpoint.runtime import UNTOLD, EndpointRuntime, gaps_of, prepared
from optigpu.backends.serving import Streamed
from optigpu.documents.rounds import LoadRun
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from optigpu.workloads.serve import Serve
from tests.engine.converted_engines import TINY, ordered
from tests.servers.completions import (
    EVENTS,
    JSON,
    TEXT,
    Asked,
    Behave,
    CompletionServer,
    Reply,
    page,
    serving,
    whole,
)

PROMPT = np.arange(24).reshape(2, 12) + 5
NEW = 6


def order(server: CompletionServer, folder: Path, model: str = "tiny", reference: str = TINY) -> Order:
    endpoint = f"{server.url}/v1#{model}" if model else f"{server.url}/v1"
    return ordered(folder, model=reference, endpoint=endpoint)


@contextmanager
def asking(
    folder: Path, behave: Behave = whole, pages: Mapping[str, Behave] | None = None, model: str = "tiny"
) -> Iterator[tuple[EndpointRuntime, CompletionServer]]:
    with serving(behave, pages) as server:
        runtime = prepared(order(server, folder, model), lambda _: None)
        try:
            yield runtime, server
        finally:
            runtime.close()


def test_a_batch_is_as_many_streams_at_once(tmp_path: Path) -> None:
    with asking(tmp_path) as (runtime, server):
        found = runtime.generate(PROMPT, NEW)
        prompts = [asked.body["prompt"] for asked in server.completions()[-2:]]
    assert found.tokens.tolist() == [[UNTOLD] * NEW] * 2
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0
    assert sorted(prompts, key=str) == sorted(PROMPT.tolist(), key=str)
    assert runtime.decoded == (2, 12 + NEW)


def test_no_prompt_is_asked_twice(tmp_path: Path) -> None:
    with asking(tmp_path) as (runtime, server):
        for _ in range(3):
            runtime.generate(PROMPT[:1], NEW)
        first = [asked.body["prompt"][0] for asked in server.completions()[-3:]]  # type: ignore[index]
        rest = {str(asked.body["prompt"][1:]) for asked in server.completions()[-3:]}  # type: ignore[index]
    assert first == [5, 6, 7]
    assert len(rest) == 1


async def telling_ids(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens):
        ends = "length" if number == asked.new_tokens - 1 else None
        await reply.token("a", ends, ids=[number] if asked.body.get("return_token_ids") else None)
    await reply.usage(asked.new_tokens, asked.prompt_tokens)


def test_ids_are_the_generation_s_where_the_server_tells_them(tmp_path: Path) -> None:
    with asking(tmp_path, telling_ids) as (runtime, _):
        assert runtime.generate(PROMPT, NEW).tokens.tolist() == [list(range(NEW))] * 2


def refusing(*fields: str, ids: bool = True, tells: bool = False) -> Behave:
    """A server that takes none of these fields, and ids only if said so; of a text it counts the tokens itself.

    It `tells` the ids of its tokens, or ignores that it is asked to.
    """
    tokenizer = tokenizer_of(parse_reference(TINY))
    assert tokenizer is not None

    async def behave(asked: Asked, reply: Reply) -> None:
        unknown = [name for name in fields if name in asked.body]
        prompt = asked.body["prompt"]
        if unknown or (isinstance(prompt, list) and not ids):
            await reply.page(422, JSON, '{"detail": "Unexpected fields in the request"}')
            return
        await reply.head(200, EVENTS)
        for number in range(asked.new_tokens):
            ends = "length" if number == asked.new_tokens - 1 else None
            await reply.token(" a", ends, ids=[number] if tells else None)
        counted = len(tokenizer.encode(prompt).ids) if isinstance(prompt, str) else asked.prompt_tokens
        await reply.usage(asked.new_tokens, counted)

    return behave


@pytest.mark.parametrize(
    ("behave", "label"),
    [
        (refusing(tells=True), "token ids; ignore_eos, min_tokens, return_token_ids"),
        (refusing("return_token_ids"), "token ids; ignore_eos, min_tokens"),
        (refusing("return_token_ids", "ignore_eos", ids=False), "text; generation_config"),
        (refusing("generation_config", "ignore_eos", ids=False), "text"),
    ],
)
def test_a_server_is_asked_in_the_way_that_it_takes(tmp_path: Path, behave: Behave, label: str) -> None:
    with asking(tmp_path, behave) as (runtime, server):
        assert runtime.notes.facts["server"]["asked_in"] == label
        runtime.generate(PROMPT, NEW)
        assert isinstance(server.completions()[-1].body["prompt"], str if label.startswith("text") else list)


async def in_a_chat(asked: Asked, reply: Reply) -> None:
    """The role, then each token, with comments between, and more tokens in the usage than were sent."""
    await reply.head(200, EVENTS)
    await reply.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for number in range(asked.new_tokens):
        await reply.raw(": keep-alive\n\n")
        ends = "length" if number == asked.new_tokens - 1 else None
        await reply.event({"choices": [{"delta": {"content": " a"}, "finish_reason": ends}]})
    await reply.usage(asked.new_tokens, 1000)


def test_a_chat_has_one_turn_and_its_role_is_no_token(tmp_path: Path) -> None:
    with serving(pages={"/v1/chat/completions": in_a_chat}) as server:
        endpoint = f"{server.url}/v1/chat#tiny"
        runtime = prepared(ordered(tmp_path, model=TINY, endpoint=endpoint), lambda _: None)
        assert len(runtime.generate(PROMPT, NEW).gaps_s) == NEW
        assert str(runtime.notes.facts["server"]["asked_in"]).startswith("chat; text")
        messages: Any = server.asked[-1].body["messages"]
        runtime.close()
    assert [turn["role"] for turn in messages] == ["user"]


def test_prompts_share_their_beginning_as_asked(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 520, "output_length": 2, "hash_ids": [1, each]} for each in (5, 6)
    ]
    trace = {"scenario": "trace", "trace": "\n".join(map(json.dumps, lines))}
    drawn = {"scenario": "Offline", "queries": 2, "prompt_tokens": 520, "shared_tokens": 512}
    with asking(tmp_path) as (runtime, server):
        for asked in (trace, drawn):
            Serve.model_validate(asked).prepare(runtime).run()
            first, second = (str(each.body["prompt"]).split(", ") for each in server.completions()[-2:])
            assert first[:512] == second[:512]
            assert first[512:] != second[512:]


def test_requests_that_fail_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    count = iter(range(100))

    async def failing(asked: Asked, reply: Reply) -> None:
        if asked.new_tokens == 7 and next(count) % 2:
            await reply.head(200, EVENTS)
            await reply.token(" a")  # and the connection is reset
        else:
            await whole(asked, reply)

    asked = {"scenario": "SingleStream", "queries": 4, "prompt_tokens": 8, "new_tokens": 7}
    with asking(tmp_path, failing) as (runtime, _):
        request = Serve.model_validate(asked).prepare(runtime)
        figures, run = request.run(), request.loaded()
    assert (run.failed, run.queries, run.output_tokens) == (2, 4, (7, 7))
    assert figures["tokens_per_s"] == 14 / run.seconds
    assert "closed the stream before the completion's end" in str(run.error)


def test_a_text_has_as_many_tokens_as_the_ids_that_it_stands_for() -> None:
    tokenizer = tokenizer_of(parse_reference(TINY))
    assert tokenizer is not None
    speller = Speller(tokenizer)
    source = np.random.default_rng(0)
    for length in (1, 2, *range(8, 33), 128):
        ids = source.integers(2048, size=length).tolist()
        assert len(tokenizer.encode(speller(ids)).ids) == length
    assert tokenizer_of(parse_reference("preset:gpt2")) is None


def test_what_a_server_says_of_itself_is_in_the_facts(tmp_path: Path) -> None:
    pages = {
        "/version": page(200, JSON, '{"version": "0.32.0"}'),
        "/metrics": page(200, TEXT, 'vllm:num_requests_running{engine="0"} 2.0\n'),
    }
    with asking(tmp_path, pages=pages) as (runtime, _):
        runtime.observe(PROMPT)
        facts = runtime.notes.facts
    assert facts["versions"] == {"test": "0.32.0"}
    assert facts["server"]["models"] == ["tiny"]
    assert facts["server_metrics"]["running"] == 2
    assert facts["server_metrics"]["preemptions"] is None


def test_the_only_model_need_not_be_named(tmp_path: Path) -> None:
    with asking(tmp_path, model="") as (_, server):
        assert server.completions()[-1].body["model"] == "tiny"
    two = page(200, JSON, '{"data": [{"id": "a"}, {"id": "b"}]}')
    with (
        pytest.raises(UnsupportedError, match="lists a, b; name the one"),
        asking(tmp_path, pages={"/v1/models": two}, model=""),
    ):
        pass


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (page(404, JSON, '{"error": {"message": "The model `tiny` does not exist."}}'), "does not exist"),
        (page(401, JSON, '{"error": "Unauthorized"}'), "asks for a key"),
        (page(200, "text/html", "<html>"), "text/html instead of a stream"),
    ],
)
def test_a_server_that_does_not_serve_is_unsupported(tmp_path: Path, behave: Behave, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said), asking(tmp_path, behave):
        pass


def test_a_server_that_is_not_allowed_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_ENDPOINT_HOSTS", "gpu-box")
    with serving() as server:
        with pytest.raises(UnsupportedError, match="OPTIGPU_ENDPOINT_HOSTS allows gpu-box"):
            prepared(order(server, tmp_path), lambda _: None)
        assert server.asked == []


def test_several_tokens_in_a_chunk_are_said(tmp_path: Path) -> None:
    async def in_threes(asked: Asked, reply: Reply) -> None:
        await reply.head(200, EVENTS)
        for begin in range(0, asked.new_tokens, 3):
            await reply.token(" a b c", "length" if begin + 3 >= asked.new_tokens else None)
        await reply.usage(asked.new_tokens, asked.prompt_tokens)

    with asking(tmp_path, in_threes) as (runtime, _):
        found = runtime.generate(PROMPT, NEW)
        assert "6 tokens in 2 chunks" in runtime.notes.facts["token_times"]
    assert len(found.gaps_s) == NEW
    assert found.gaps_s[2:] == [0.0] * 4
    assert found.gaps_s[1] > 0


def stream(*times_s: float, tokens: int | None = None, sent_s: float = 1.0) -> Streamed:
    known = tuple(times_s) if tokens is None else None
    count = len(times_s) if tokens is None else tokens
    return Streamed(times_s[0], known, count, True, None, sent_s, times_s[-1], tuple(times_s))


def test_a_token_of_a_batch_counts_when_the_last_sequence_has_it() -> None:
    assert gaps_of([stream(2, 3, 4), stream(2.5, 2.75, 5)]) == [1.5, 0.5, 2.0]
    assert gaps_of([stream(2, 3, 4, sent_s=0.5)]) == [1.5, 1, 1]


def test_chunks_take_the_place_of_tokens_that_came_together() -> None:
    assert gaps_of([stream(2, 3, 4), stream(2, 6, tokens=3)]) == [1, 4, 0]
    with pytest.raises(OptiGPUError, match="all tokens at once"):
        gaps_of([stream(2, tokens=3)])


QUERIES, RATE = 60, 60.0
SERVICE_S, LIMIT_S = 0.01, 0.04
"""What an answer takes beside its tokens, and a limit that some queries miss."""
STILL_S = 0.8


def loaded(runtime: EndpointRuntime, **workload: Any) -> LoadRun:
    """One run of a load."""
    shapes = {"queries": QUERIES, "prompt_tokens": 4, "new_tokens": 2}
    request = Serve.model_validate(shapes | workload).prepare(runtime)
    request.run()
    return request.loaded()


@dataclass
class OneByOne:
    """Answers one completion after the other, and notes how long each took."""

    services_s: list[float] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        async with self.turn:
            started = time.perf_counter()
            await asyncio.sleep(SERVICE_S)
            self.services_s.append(time.perf_counter() - started)  # before the client has its answer
            await whole(asked, reply)


@pytest.mark.slow
def test_a_poisson_run_is_what_its_samples_and_the_server_s_log_say(tmp_path: Path) -> None:
    server = OneByOne()
    with asking(tmp_path, server) as (runtime, _):
        server.services_s.clear()
        found = loaded(runtime, rates=[RATE], ttft_s=LIMIT_S)
    gaps = np.random.default_rng(0).exponential(size=QUERIES + 1)
    sent_s, latency_s, ttft_s = map(np.array, (found.sent_s, found.latency_s, found.ttft_s))
    assert sent_s == pytest.approx(np.cumsum(gaps[:-1]) * QUERIES / RATE / gaps.sum())
    ends_s, free_s = sent_s + latency_s, 0.0
    for arrival_s, service_s, end_s in zip(sent_s, server.services_s, np.sort(ends_s), strict=True):
        free_s = max(arrival_s, free_s) + service_s  # Lindley's recursion, whoever is served
        assert end_s >= free_s - 1e-3
    assert found.seconds >= ends_s.max() - 1e-3
    assert found.met == np.count_nonzero(ttft_s <= LIMIT_S)
    assert found.goodput_per_s == pytest.approx(found.met / found.seconds)
    moments = np.linspace(0, found.seconds, 20_000, endpoint=False)
    waiting = [np.count_nonzero((sent_s <= moment) & (moment < sent_s + ttft_s)) for moment in moments]
    assert found.waiting == pytest.approx(np.mean(waiting), rel=0.01)
    law = found.law
    assert law.expected + law.rate * law.late_s == pytest.approx(latency_s.sum() / found.seconds)
    assert law.holds


@dataclass
class StandingStill:
    """Answers at once, but for STILL_S from the fifth completion on to nobody."""

    count: int = 0
    until_s: float = 0.0

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        self.count += 1
        if self.count == 5:
            self.until_s = time.perf_counter() + STILL_S
        await asyncio.sleep(max(0.0, self.until_s - time.perf_counter()))
        await whole(asked, reply)


@pytest.mark.slow
def test_a_server_that_stands_still_is_slow_for_all_that_came_meanwhile(tmp_path: Path) -> None:
    """Coordinated omission: a client that waits for its answer sends nothing meanwhile, and so has one slow query."""
    server = StandingStill()
    with asking(tmp_path, server) as (runtime, _):
        server.count = 0
        waiting = np.array(loaded(runtime, scenario="closed", clients=1).latency_s)
        server.count = 0
        arriving = np.array(loaded(runtime, rates=[RATE]).latency_s)
    assert max(waiting) > STILL_S
    assert np.count_nonzero(waiting > STILL_S / 2) == 1
    assert np.count_nonzero(arriving > STILL_S / 2) > QUERIES / 5
    assert np.percentile(waiting, 90) < STILL_S / 2 < np.percentile(arriving, 90)
