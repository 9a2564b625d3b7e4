"""Streamed completions of a server that speaks OpenAI's interface, with the time of each token.

    async with Completions(server) as completions:
        streamed = await completions.stream(prompt, new_tokens=64)

A completion that fails is a `Streamed` with its error, so that one of many clients never stops the others.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from optigpu.backends.serving import Streamed
from optigpu.http_clients import direct_http_client, trusted_for
from optigpu.vocabulary import Frozen, OptiGPUError

STREAM, JSON = "text/event-stream", "application/json"
MOST_BYTES = 256 * 2**20
"""Of one answer."""
MOST_LINE_BYTES = 4 * 2**20
MOST_REFUSAL_BYTES = 4096
"""So much of a refusal is read."""
Spelling = Callable[[Sequence[int]], str]
"""The text of token ids."""
Options = Callable[[int], Mapping[str, object]]
"""Fields of a request beyond OpenAI's, for so many new tokens."""
_MEANINGS = {
    400: "refused the request",
    401: "asks for a key; set OPTIGPU_ENDPOINT_KEYS for the worker",
    403: "does not allow it with this key",
    404: "has no such address or model; compare the endpoint with its /v1/models",
    422: "refused the request",
    429: "has too many requests; ask for fewer at once",
}
_OF_THE_REQUEST = frozenset({400, 405, 415, 422, 500, 501})
"""With which servers answer what they do not understand; some take a list of ids for an error of their own."""


class StreamError(OptiGPUError):
    """An answer that is not a whole completion."""


class RefusedError(StreamError):
    """The server does not take the request as it was written."""


class _Problem(BaseModel):
    error: object = None
    message: object = None
    detail: object = None

    def said(self) -> str:
        """The first sentence that the document has."""
        inner = self.error.get("message") if isinstance(self.error, dict) else self.error
        return next((str(text) for text in (inner, self.message, self.detail) if text), "")


async def require_answer(response: httpx.Response, wanted: str) -> None:
    """Raises StreamError for an answer of another content type, with what the server said; else reads nothing of it."""
    if response.has_redirect_location:
        raise StreamError(
            f"The server sends requests on to {response.headers['location'][:200]!r}, and redirects are not followed; "
            "name that address as the endpoint."
        )
    if not response.is_success:
        status = response.status_code
        body = await _start_of(response)
        try:
            said = _Problem.model_validate_json(body).said()[:300]
        except ValidationError:
            said = " ".join(body.split())[:200]
        kind = RefusedError if status in _OF_THE_REQUEST else StreamError
        why = f": {said}" if said else "."
        raise kind(f"The server {_MEANINGS.get(status, 'failed')} (status {status}){why}")
    content = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != wanted:
        start = " ".join((await _start_of(response)).split())[:80]
        form = "a stream" if wanted == STREAM else "JSON"
        raise StreamError(
            f"The server answered with {content or 'no content type'} instead of {form}: {start!r}; correct the "
            "endpoint's address."
        )


def transport_error(error: Exception, url: str, received: str) -> str:
    """What a connection that failed means; `received` is what came before."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return f"No server answers at {url} ({error}); start it, or correct the endpoint."
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
        return f"The server closed the stream before the completion's end, with {received}."
    return f"The request to {url} failed: {type(error).__name__}: {error}"


async def _start_of(response: httpx.Response) -> str:
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) >= MOST_REFUSAL_BYTES:
            break
    return found[:MOST_REFUSAL_BYTES].decode(errors="replace")


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(BaseModel):
    text: str | None = ""
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Usage(BaseModel):
    completion_tokens: int = Field(0, ge=0)
    prompt_tokens: int | None = Field(None, ge=0)


class _Fault(BaseModel):
    message: str = ""


class _Event(BaseModel):
    """One chunk: a piece of text, the server's count of tokens so far, or both."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Fault | str | None = None


async def _events(response: httpx.Response) -> AsyncIterator[_Event]:
    """The chunks of a streamed answer up to its end. Raises StreamError for what is none."""
    async for line in _lines(response):
        name, _, value = line.partition(":")
        if name != "data":
            continue
        value = value.strip()
        if value == "[DONE]":
            return
        try:
            event = _Event.model_validate_json(value)
        except ValidationError:
            raise StreamError(
                f"The server sent {value[:80]!r}, which is not a chunk of a completion."
            ) from None
        if event.error is not None:
            said = event.error if isinstance(event.error, str) else event.error.message
            raise StreamError(f"The server ended the stream with an error: {said[:300]}")
        yield event


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


class Watched:
    """What has come of one completion."""

    def __init__(self, asked: int, *, chat: bool = False) -> None:
        """`asked` tokens; the request is about to be sent. In a `chat` the server adds words of its own to the prompt,
        so that its count says nothing of what was sent."""
        self._asked, self._chat = asked, chat
        self._sent_s = time.perf_counter()
        self._times_s: list[float] = []
        self._shown_s: list[float] = []
        self._silent_end_s: float | None = None
        self._text = ""
        self._ids: tuple[int, ...] | None = ()
        self._usage: _Usage | None = None
        self._ended = False

    @property
    def received(self) -> str:
        """How much came, for a sentence."""
        count = len(self._shown_s)
        return f"{count} chunk{'' if count == 1 else 's'} of text received"

    def take(self, event: _Event) -> None:
        """The next chunk. One that ends the completion without text has a token or none: only the count tells."""
        now = time.perf_counter()
        self._usage = event.usage or self._usage
        if not event.choices:
            return
        choice = event.choices[0]
        turn, ends = choice.delta, choice.finish_reason is not None
        text = (turn.reasoning_content or turn.content or "") if turn else choice.text or ""
        if turn and not text and not ends:
            return  # it names the role alone
        self._ended = self._ended or ends
        self._text += text
        self._ids = None if self._ids is None or choice.token_ids is None else self._ids + choice.token_ids
        if text:
            self._shown_s.append(now)
            if len(self._shown_s) > 2 * self._asked + 64:  # it does not stop
                raise StreamError(f"The server went on after {self.received} for {self._asked} tokens.")
        if text or not ends:
            self._times_s.append(now)
        else:
            self._silent_end_s = now

    def judged(self) -> Streamed:
        """Compares what came with what was asked for and with what the server counted."""
        other_count = self._usage is not None and self._usage.completion_tokens != self._asked
        return self.streamed(self._problem(), refused=self._ended and other_count)

    def _problem(self) -> str | None:
        if not self._ended:
            return f"The server closed the stream before the completion's end, with {self.received}."
        if self._usage is None:
            return (
                "The server gave no usage figures, so its tokens cannot be counted; use one that knows "
                "stream_options.include_usage."
            )
        counted, size = self._usage.completion_tokens, len(self._text.encode())
        if counted < len(self._shown_s):
            return f"The server counted {counted} tokens and sent text in {len(self._shown_s)} chunks."
        if counted != self._asked:
            return f"The server decoded {counted} tokens instead of the {self._asked} asked for."
        if not self._tells(counted) and size < counted:
            return (
                f"The server counted {counted} tokens in a text of {size} bytes: some were not shown, or not "
                "decoded."
            )
        return None

    def _tells(self, counted: int) -> bool:
        """Whether the id of each token came."""
        return self._ids is not None and len(self._ids) == counted

    def streamed(self, error: str | None, *, refused: bool = False, overdue: bool = False) -> Streamed:
        """What came, before the error where there is one."""
        usage = self._usage or _Usage()
        counted = usage.completion_tokens
        silent = [] if self._silent_end_s is None else [self._silent_end_s]
        # Each is a way to see one chunk in each token.
        ways = (self._times_s, [*self._times_s, *silent], self._shown_s)
        times_s = next((tuple(times_s) for times_s in ways if len(times_s) == counted), None)
        sent = f"{counted} tokens in {len(self._times_s)} chunks"
        untimed = f"The server sent {sent}, so that the times of single tokens are not known."
        return Streamed(
            first_s=self._times_s[0] if self._times_s else self._silent_end_s,
            token_times_s=times_s,
            tokens=counted,
            finished=error is None,
            error=error,
            sent_s=self._sent_s,
            ended_s=time.perf_counter(),
            chunk_times_s=tuple(self._times_s),
            prompt_tokens=None if self._chat else usage.prompt_tokens,
            text=self._text,
            ids=self._ids if self._usage and self._tells(counted) else None,
            untimed=None if times_s is not None else untimed,
            refused=refused,
            overdue=overdue,
        )


@dataclass(frozen=True)
class Server:
    """A server whose address the worker's settings allow (`require_allowed` says which).

    `url` ends before `/completions`, such as "http://127.0.0.1:8000/v1". `options` gives fields beyond OpenAI's that it
    takes, such as ignore_eos. `spelling` writes a prompt as text for a server that takes no token ids, and for a
    `chat`, whose only turn it is. A completion must be whole after `time_limit_s`.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    options: Options = lambda _new_tokens: {}
    spelling: Spelling | None = None
    time_limit_s: float = 600.0
    chat: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """What each request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Completions(AbstractAsyncContextManager["Completions"]):
    """One client with connections of its own; any number of `stream` calls may run at once."""

    def __init__(self, server: Server, connections: int | None = None) -> None:
        """`connections` bounds those that are open at once; None bounds nothing, so that no request waits here."""
        self._server = server
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = direct_http_client(
            trusted_for(server.url), headers=server.headers, limits=limits, timeout=None
        )

    async def __aexit__(self, *_raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def stream(self, prompt: Sequence[int], new_tokens: int) -> Streamed:
        """Greedy decoding of `new_tokens` tokens after the ids of `prompt`."""
        address, body = f"{self._server.url}/completions", self._body(prompt, new_tokens)
        watched = Watched(new_tokens, chat=self._server.chat)
        try:
            async with asyncio.timeout(self._server.time_limit_s):
                async with self._http.stream("POST", address, json=body) as response:
                    await require_answer(response, STREAM)
                    async for event in _events(response):
                        watched.take(event)
        except TimeoutError:
            limit = f"{self._server.time_limit_s:g} s"
            return watched.streamed(
                f"The server had not ended its answer after {limit}, with {watched.received}.", overdue=True
            )
        except StreamError as error:
            return watched.streamed(str(error), refused=isinstance(error, RefusedError))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return watched.streamed(transport_error(error, self._server.url, watched.received))
        return watched.judged()

    async def answer(self, address: str, body: Mapping[str, object]) -> bytes:
        """The whole answer to a request that asks for no stream. Raises StreamError for a refusal and for what is not
        JSON, and OptiGPUError for no answer, one that is too long, and one that takes too long."""
        found = bytearray()
        try:
            async with asyncio.timeout(self._server.time_limit_s):
                named = {"model": self._server.model, **body}
                async with self._http.stream("POST", address, json=named) as response:
                    await require_answer(response, JSON)
                    async for piece in response.aiter_bytes():
                        found += piece
                        if len(found) > MOST_BYTES:
                            raise OptiGPUError("The server's answer is longer than any; it was cut off.")
        except TimeoutError:
            limit = f"{self._server.time_limit_s:g} s"
            raise OptiGPUError(f"The server had not ended its answer after {limit}.") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            received = f"{len(found)} bytes received"
            raise OptiGPUError(transport_error(error, self._server.url, received)) from error
        return bytes(found)

    def _body(self, prompt: Sequence[int], new_tokens: int) -> Mapping[str, object]:
        spelling = self._server.spelling
        text = spelling(prompt) if spelling else [int(token) for token in prompt]
        given = {"messages": [{"role": "user", "content": text}]} if self._server.chat else {"prompt": text}
        return {
            "model": self._server.model,
            **given,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.options(new_tokens),
        }


MOST_PAGE_BYTES = 4 * 2**20
TIME_LIMIT_S = 5.0
"""Of the server's other pages. None of them is needed, so none may do harm."""
Page = TypeVar("Page", bound=BaseModel)


class ServerAbout(Frozen):
    """What a server says of itself; null where it does not. `models` are those that it lists."""

    software: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()


class _Model(BaseModel):
    id: str
    owned_by: str | None = None


class _Models(BaseModel):
    data: tuple[_Model, ...] = ()


class _Version(BaseModel):
    version: str = Field(validation_alias=AliasChoices("version", "build_info"))


async def about(http: httpx.AsyncClient, url: str, origin: str) -> ServerAbout:
    """Asks /v1/models, /version, TGI's /info, Ollama's /api/version and llama-server's /props."""
    listed = await _read(http, f"{url}/models", _Models)
    models = listed.data if listed else ()
    owner = next((model.owned_by for model in models if model.owned_by), None)
    version = None
    for path in ("/version", "/info", "/api/version", "/props"):
        found = await _read(http, origin + path, _Version)
        if found:
            version = found.version[:100]
            break
    return ServerAbout(software=owner, version=version, models=tuple(model.id for model in models))


async def _read(http: httpx.AsyncClient, address: str, kind: type[Page]) -> Page | None:
    text = await page_of(http, address)
    try:
        return kind.model_validate_json(text) if text else None
    except ValidationError:
        return None


async def page_of(http: httpx.AsyncClient, address: str) -> str | None:
    """The text of a page, None for one that is not there, too long or too slow. Redirects are not followed."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S), http.stream("GET", address) as response:
            if not response.is_success:
                return None
            found = b""
            async for piece in response.aiter_bytes():
                found += piece
                if len(found) > MOST_PAGE_BYTES:
                    return None
            return found.decode(errors="replace")
    except (httpx.HTTPError, TimeoutError):
        return None
