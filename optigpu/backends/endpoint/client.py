"""Streamed completions of a server that speaks OpenAI's interface, with the time of each token.

    async with Completions(server) as completions:
        streamed = await completions.stream(prompt, new_tokens=64)

A completion that fails is a `Streamed` with its error, so that one of many clients never stops the others.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx
from pydantic import BaseModel, Field, ValidationError

from optigpu.backends.endpoint.errors import RefusedError, StreamError, require_stream, transport_error
from optigpu.http_clients import direct_http_client, trusted_for

MOST_BYTES = 256 * 2**20
"""Of one answer."""
MOST_LINE_BYTES = 4 * 2**20
DONE = "[DONE]"


@dataclass(frozen=True)
class Chunk:
    """One event: a piece of text, the server's count of tokens, or both.

    `ids` are those of the text's tokens, None where the server does not tell. `usage` is the tokens decoded so far, and
    those of the prompt where they are told. `ends` is True from the one that says why the completion ended.
    """

    has_choice: bool
    text: str
    ends: bool
    ids: tuple[int, ...] | None
    usage: tuple[int, int | None] | None


class _Choice(BaseModel):
    text: str | None = ""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Usage(BaseModel):
    completion_tokens: int = Field(0, ge=0)
    prompt_tokens: int | None = Field(None, ge=0)


class _Fault(BaseModel):
    message: str = ""


class _Event(BaseModel):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Fault | str | None = None


async def chunks_of(response: httpx.Response) -> AsyncIterator[Chunk]:
    """The chunks of a streamed answer up to its end. Raises StreamError for what is none."""
    async for line in _lines(response):
        name, _, value = line.partition(":")
        if name != "data":
            continue
        value = value.strip()
        if value == DONE:
            return
        yield _chunk(value)


def _chunk(text: str) -> Chunk:
    try:
        event = _Event.model_validate_json(text)
    except ValidationError:
        raise StreamError(f"The server sent {text[:80]!r}, which is not a chunk of a completion.") from None
    if event.error is not None:
        said = event.error if isinstance(event.error, str) else event.error.message
        raise StreamError(f"The server ended the stream with an error: {said[:300]}")
    choice = event.choices[0] if event.choices else None
    usage = event.usage
    return Chunk(
        has_choice=choice is not None,
        text=(choice.text or "") if choice else "",
        ends=choice is not None and choice.finish_reason is not None,
        ids=choice.token_ids if choice else None,
        usage=None if usage is None else (usage.completion_tokens, usage.prompt_tokens),
    )


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Raises StreamError for an answer or a line that is too long to be one."""
    total, rest = 0, b""
    async for piece in response.aiter_bytes():
        total += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        if total > MOST_BYTES or len(rest) > MOST_LINE_BYTES:
            raise StreamError("The server's answer is longer than any completion; it was cut off.")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


__all__ = ["Completions", "Options", "Server", "Spelling", "Streamed", "no_options"]

Spelling = Callable[[Sequence[int]], str]
"""The text of token ids."""
Options = Callable[[int], Mapping[str, object]]
"""Fields of a request beyond OpenAI's, for so many new tokens."""


@dataclass(frozen=True)
class Streamed:
    """One completion. All times are of `time.perf_counter`, in seconds.

    `first_s` is when the first token came, None if none did. `token_times_s` has the time of each of `tokens`; None
    where one chunk held several, and `untimed` says so. `chunk_times_s` are those of the chunks. `tokens` is the
    server's own count, 0 before it gave one. `finished` is True when the stream came to its end with as many tokens as
    were asked for; otherwise `error` says in a sentence why not, and `refused` that the server, asked in another way,
    may do it, or `overdue` that it was not waited for any longer. `text` is what came, and `ids` its tokens where the
    server tells them.
    """

    first_s: float | None
    token_times_s: tuple[float, ...] | None
    tokens: int
    finished: bool
    error: str | None
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunk_times_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    text: str = ""
    ids: tuple[int, ...] | None = None
    untimed: str | None = None
    refused: bool = False
    overdue: bool = False


class Watched:
    """What has come of one completion."""

    def __init__(self, asked: int) -> None:
        """`asked` tokens; the request is about to be sent."""
        self._asked = asked
        self._sent_s = time.perf_counter()
        self._times_s: list[float] = []
        self._shown_s: list[float] = []
        self._silent_end_s: float | None = None
        self._text = ""
        self._ids: tuple[int, ...] | None = ()
        self._usage: tuple[int, int | None] | None = None
        self._ended = False

    @property
    def received(self) -> str:
        """How much came, for a sentence."""
        count = len(self._shown_s)
        return f"{count} chunk{'' if count == 1 else 's'} of text received"

    def take(self, chunk: Chunk) -> None:
        """The next chunk. One that ends the completion without text has a token or none: only the count tells."""
        now = time.perf_counter()
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not chunk.has_choice:
            return
        self._ended = self._ended or chunk.ends
        self._text += chunk.text
        self._ids = None if self._ids is None or chunk.ids is None else self._ids + chunk.ids
        if chunk.text:
            self._shown_s.append(now)
        if chunk.text or not chunk.ends:
            self._times_s.append(now)
        else:
            self._silent_end_s = now

    def failed(self, error: str, *, refused: bool = False, overdue: bool = False) -> Streamed:
        """What came before the error."""
        return self._streamed(error, refused, overdue)

    def judged(self) -> Streamed:
        """Compares what came with what was asked for and with what the server counted."""
        other_count = self._usage is not None and self._usage[0] != self._asked
        return self._streamed(self._problem(), self._ended and other_count)

    def _problem(self) -> str | None:
        if not self._ended:
            return f"The server closed the stream before the completion's end, with {self.received}."
        if self._usage is None:
            return (
                "The server gave no usage figures, so its tokens cannot be counted; use one that knows "
                "stream_options.include_usage."
            )
        counted, size = self._usage[0], len(self._text.encode())
        if counted < len(self._shown_s):
            return f"The server counted {counted} tokens and sent text in {len(self._shown_s)} chunks."
        if counted != self._asked:
            return f"The server decoded {counted} tokens instead of the {self._asked} asked for."
        if not self._told and size < counted:
            return (
                f"The server counted {counted} tokens in a text of {size} bytes: some were not shown, or not "
                "decoded."
            )
        return None

    @property
    def _told(self) -> bool:
        """Whether the id of each token came."""
        return self._usage is not None and self._ids is not None and len(self._ids) == self._usage[0]

    def _streamed(self, error: str | None, refused: bool, overdue: bool = False) -> Streamed:
        counted, prompt_tokens = self._usage or (0, None)
        times_s = self._token_times(counted)
        return Streamed(
            first_s=self._times_s[0] if self._times_s else self._silent_end_s,
            token_times_s=times_s,
            tokens=counted,
            finished=error is None,
            error=error,
            sent_s=self._sent_s,
            ended_s=time.perf_counter(),
            chunk_times_s=tuple(self._times_s),
            prompt_tokens=prompt_tokens,
            text=self._text,
            ids=self._ids if self._told else None,
            untimed=None if times_s is not None else self._untimed(counted),
            refused=refused,
            overdue=overdue,
        )

    def _token_times(self, counted: int) -> tuple[float, ...] | None:
        """One for each token, if there is a way to see one chunk in each."""
        silent = [] if self._silent_end_s is None else [self._silent_end_s]
        ways = (self._times_s, [*self._times_s, *silent], self._shown_s)
        return next((tuple(times_s) for times_s in ways if len(times_s) == counted), None)

    def _untimed(self, counted: int) -> str:
        return (
            f"The server sent {counted} tokens in {len(self._times_s)} chunks, so that the times of single tokens are "
            "not known."
        )


def no_options(_new_tokens: int) -> Mapping[str, object]:
    """OpenAI's fields alone."""
    return {}


@dataclass(frozen=True)
class Server:
    """A server whose address the worker's settings allow (`require_allowed` says which).

    `url` ends before `/completions`, such as "http://127.0.0.1:8000/v1". `options` gives fields beyond OpenAI's that it
    takes, such as ignore_eos. `spelling` writes a prompt as text for a server that takes no token ids. A completion
    must be whole after `time_limit_s`.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    options: Options = no_options
    spelling: Spelling | None = None
    time_limit_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Completions:
    """One client with connections of its own; any number of `stream` calls may run at once."""

    def __init__(self, server: Server, connections: int | None = None) -> None:
        """`connections` bounds those that are open at once; None bounds nothing, so that no request waits here."""
        self._server = server
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = direct_http_client(
            trusted_for(server.url), headers=server.headers, limits=limits, timeout=None
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def stream(self, prompt: Sequence[int], new_tokens: int) -> Streamed:
        """Greedy decoding of `new_tokens` tokens after the ids of `prompt`."""
        body = self._body(prompt, new_tokens)
        watched = Watched(new_tokens)
        try:
            async with asyncio.timeout(self._server.time_limit_s):
                await self._receive(body, watched)
        except TimeoutError:
            limit = f"{self._server.time_limit_s:g} s"
            return watched.failed(
                f"The server had not ended its answer after {limit}, with {watched.received}.", overdue=True
            )
        except StreamError as error:
            return watched.failed(str(error), refused=isinstance(error, RefusedError))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return watched.failed(transport_error(error, self._server.url, watched.received))
        return watched.judged()

    async def _receive(self, body: Mapping[str, object], watched: Watched) -> None:
        address = f"{self._server.url}/completions"
        async with self._http.stream("POST", address, json=body) as response:
            await require_stream(response)
            async for chunk in chunks_of(response):
                watched.take(chunk)

    def _body(self, prompt: Sequence[int], new_tokens: int) -> Mapping[str, object]:
        spelling = self._server.spelling
        return {
            "model": self._server.model,
            "prompt": spelling(prompt) if spelling else [int(token) for token in prompt],
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.options(new_tokens),
        }
