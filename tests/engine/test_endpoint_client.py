"""The client of streamed completions, against servers that answer well and badly."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from optigpu.backends.endpoint.client import Completions, Server
from optigpu.backends.serving import Streamed
from tests.servers.completions import EVENTS, HTML, JSON, Asked, Behave, Reply, page, serving, whole

PROMPT, NEW = list(range(6)), 5


def streamed(
    behave: Behave, new_tokens: int = NEW, time_limit_s: float = 20.0, prompt: Sequence[int] = PROMPT
) -> Streamed:
    with serving(behave) as server:
        return asyncio.run(
            asked_of(Server(f"{server.url}/v1", "tiny", time_limit_s=time_limit_s), new_tokens, prompt)
        )


async def asked_of(server: Server, new_tokens: int = NEW, prompt: Sequence[int] = PROMPT) -> Streamed:
    async with Completions(server) as completions:
        return await completions.stream(prompt, new_tokens)


def test_each_token_has_its_time_and_the_server_counts_them() -> None:
    found = streamed(whole)
    assert (found.error, found.finished, found.tokens) == (None, True, NEW)
    assert found.prompt_tokens == len(PROMPT)
    assert found.text == " t0 t1 t2 t3 t4"
    assert found.token_times_s is not None
    assert found.first_s == found.token_times_s[0]
    assert sorted(found.token_times_s) == list(found.token_times_s)
    assert found.sent_s < found.first_s < found.token_times_s[-1] <= found.ended_s


def test_what_is_asked_is_openai_s_and_greedy() -> None:
    with serving() as server:
        asyncio.run(asked_of(Server(f"{server.url}/v1", "tiny", key="secret")))
        (asked,) = server.completions()
    assert asked.body == {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": NEW,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(Server("http://127.0.0.1/v1", "tiny", key="secret"))


async def closing_half_way(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await reply.token(" b")


async def closing_within_a_chunked_answer(asked: Asked, reply: Reply) -> None:
    await reply.raw(f"HTTP/1.1 200 OK\r\ncontent-type: {EVENTS}\r\ntransfer-encoding: chunked\r\n\r\n")
    event = f"data: {json.dumps({'choices': [{'text': ' a', 'finish_reason': None}]})}\n\n"
    await reply.raw(f"{len(event):x}\r\n{event}\r\n40\r\ndata: ")


async def with_fewer(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await reply.token(" b", "stop")
    await reply.usage(2, asked.prompt_tokens)


async def counting_too_few(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    for _ in range(2 * asked.new_tokens):
        await reply.token(" a")
    await reply.token("", "length")
    await reply.usage(asked.new_tokens, asked.prompt_tokens)


async def counting_too_many(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await reply.token("", "length")
    await reply.usage(asked.new_tokens, asked.prompt_tokens)


async def counting_nothing(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens):
        await reply.token(" a", "length" if number == asked.new_tokens - 1 else None)
    await reply.raw("data: [DONE]\n\n")


async def garbage(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await reply.raw('data: {"choices": [{"text": \n\n')


async def with_a_line_without_end(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    for _ in range(80):
        await reply.raw("a" * 2**16)


async def going_on(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    while True:
        await reply.token(" a")


CLOSED = "The server closed the stream before the completion's end, with "
REASONS: dict[Behave, str] = {
    closing_half_way: f"{CLOSED}2 chunks of text received.",
    closing_within_a_chunked_answer: f"{CLOSED}1 chunk of text received.",
    with_fewer: "The server decoded 2 tokens instead of the 5 asked for.",
    counting_too_few: "The server counted 5 tokens and sent text in 10 chunks.",
    counting_too_many: "The server counted 5 tokens in a text of 2 bytes: some were not shown, or not decoded.",
    counting_nothing: "The server gave no usage figures, so its tokens cannot be counted; use one that knows "
    "stream_options.include_usage.",
    garbage: 'The server sent \'{"choices": [{"text":\', which is not a chunk of a completion.',
    going_on: "The server went on after 75 chunks of text received for 5 tokens.",
    with_a_line_without_end: "The server's answer is longer than any completion; it was cut off.",
}


@pytest.mark.parametrize("behave", REASONS)
def test_a_stream_that_is_not_whole_says_why(behave: Behave) -> None:
    found = streamed(behave)
    assert found.error == REASONS[behave]
    assert not found.finished


@pytest.mark.parametrize(
    ("status", "body", "said", "refused"),
    [
        (400, '{"error": {"message": "prompt must be a string"}}', "the request (status 400): prompt must", True),
        (404, '{"detail": "Not Found"}', "compare the endpoint with its /v1/models (status 404): Not Found", False),
        (429, '{"message": "slow down"}', "ask for fewer at once (status 429): slow down", False),
        (500, "<html>Internal Server Error</html>", "failed (status 500): <html>Internal", True),
    ],
)  # fmt: skip
def test_a_refusal_is_one_sentence(status: int, body: str, said: str, refused: bool) -> None:
    found = streamed(page(status, JSON, body))
    assert found.error is not None
    assert said in found.error
    assert found.refused is refused
    assert found.first_s is None


def test_redirects_are_not_followed() -> None:
    with serving() as other:
        found = streamed(page(307, HTML, "", location=f"{other.url}/v1/completions"))
        assert not other.asked
    assert found.error is not None
    assert "redirects are not followed" in found.error
    assert not found.refused


async def hanging(asked: Asked, reply: Reply) -> None:
    await asyncio.sleep(60)


async def dripping(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    while True:
        await reply.raw("d")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("behave", [hanging, dripping])
def test_a_server_that_does_not_come_to_an_end_is_left(behave: Behave) -> None:
    found = streamed(behave, time_limit_s=0.3)
    assert found.error == "The server had not ended its answer after 0.3 s, with 0 chunks of text received."


def test_nobody_listens() -> None:
    with serving() as server:
        url = f"{server.url}/v1"
    found = asyncio.run(asked_of(Server(url, "tiny")))
    assert found.error is not None
    assert found.error.startswith(f"No server answers at {url} (")
