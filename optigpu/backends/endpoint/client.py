"""Streamed completions of a server that speaks OpenAI's interface, with the time of each token.

    async with Completions(server) as completions:
        streamed = await completions.stream(prompt, new_tokens=64)

A completion that fails is a `Streamed` with its error, so that one of many clients never stops the others.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from optigpu.backends.endpoint.chunks import chunks_of
from optigpu.backends.endpoint.errors import RefusedError, StreamError, require_stream, transport_error
from optigpu.backends.endpoint.streamed import Streamed, Watched
from optigpu.http_clients import direct_http_client, trusted_for

__all__ = ["Completions", "Options", "Server", "Spelling", "Streamed", "no_options"]

Spelling = Callable[[Sequence[int]], str]
"""The text of token ids."""
Options = Callable[[int], Mapping[str, object]]
"""Fields of a request beyond OpenAI's, for so many new tokens."""


def no_options(_new_tokens: int) -> Mapping[str, object]:
    """OpenAI's fields alone."""
    return {}


@dataclass(frozen=True)
class Server:
    """A server whose address the worker's settings allow (`address.py` says which).

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
