"""A small server of streamed completions on loopback, which answers as a test says, well or badly."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

EVENTS, JSON, HTML, TEXT = "text/event-stream", "application/json", "text/html", "text/plain; version=0.0.4"


@dataclass(frozen=True)
class Asked:
    """One request as it was read."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, object]

    @property
    def new_tokens(self) -> int:
        """How many tokens it asks for."""
        count = self.body["max_tokens"]
        assert isinstance(count, int)
        return count

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompt: of ids their number, of a text its words."""
        prompt = self.body["prompt"]
        assert isinstance(prompt, str | list)
        return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


class Reply:
    """What a behaviour writes its answer with."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def head(self, status: int, kind: str, **headers: str) -> None:
        """The status line and the headers; the answer ends when the connection does."""
        lines = [f"HTTP/1.1 {status} Said", f"content-type: {kind}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]))

    async def raw(self, text: str) -> None:
        """These characters."""
        self._writer.write(text.encode())
        await self._writer.drain()

    async def page(self, status: int, kind: str, text: str, **headers: str) -> None:
        """A whole answer."""
        await self.head(status, kind, **headers)
        await self.raw(text)

    async def event(self, document: object) -> None:
        """One event of a stream."""
        await self.raw(f"data: {json.dumps(document)}\n\n")

    async def token(self, text: str, ends: str | None = None, ids: Sequence[int] | None = None) -> None:
        """A chunk of text."""
        told = {} if ids is None else {"token_ids": list(ids)}
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": ends, **told}]})

    async def usage(self, tokens: int, prompt_tokens: int) -> None:
        """The chunk with the counts, and the stream's end."""
        counts = {"completion_tokens": tokens, "prompt_tokens": prompt_tokens}
        await self.event({"choices": [], "usage": counts})
        await self.raw("data: [DONE]\n\n")


Behave = Callable[[Asked, Reply], Awaitable[None]]
"""How a request is answered."""


async def whole(asked: Asked, reply: Reply) -> None:
    """Each token in a chunk of its own, then the counts."""
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens):
        await asyncio.sleep(0.001)
        await reply.token(f" t{number}", "length" if number == asked.new_tokens - 1 else None)
    await reply.usage(asked.new_tokens, asked.prompt_tokens)


def page(status: int, kind: str, text: str, **headers: str) -> Behave:
    """The same page for each request."""

    async def behave(_: Asked, reply: Reply) -> None:
        await reply.page(status, kind, text, **headers)

    return behave


@dataclass
class CompletionServer:
    """A running server: its address, what it was asked, and how it answers by path."""

    port: int
    pages: dict[str, Behave]
    asked: list[Asked] = field(default_factory=list)

    @property
    def url(self) -> str:
        """What a job names before the #."""
        return f"http://127.0.0.1:{self.port}"

    def completions(self) -> list[Asked]:
        """The requests for completions."""
        return [each for each in self.asked if each.path == "/v1/completions"]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads a request and answers it."""
        try:
            asked = await _read(reader)
            self.asked.append(asked)
            behave = self.pages.get(asked.path, page(404, JSON, '{"detail": "Not Found"}'))
            await behave(asked, Reply(writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()


@contextmanager
def serving(behave: Behave = whole, pages: Mapping[str, Behave] | None = None) -> Iterator[CompletionServer]:
    """A server whose /v1/completions behaves so, and which lists one model, "tiny"."""
    models = page(200, JSON, '{"object": "list", "data": [{"id": "tiny", "owned_by": "test"}]}')
    known = {"/v1/models": models, "/v1/completions": behave} | dict(pages or {})
    ready, running = threading.Event(), list[Running]()
    thread = threading.Thread(target=_run, args=(known, ready, running))
    thread.start()
    ready.wait()
    server, loop, stop = running[0]
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


Running = tuple[CompletionServer, asyncio.AbstractEventLoop, asyncio.Event]


def _run(pages: dict[str, Behave], ready: threading.Event, running: list[Running]) -> None:
    asyncio.run(_serve(pages, ready, running))


async def _serve(pages: dict[str, Behave], ready: threading.Event, running: list[Running]) -> None:
    server = CompletionServer(0, pages)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.answer(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    stop = asyncio.Event()
    running.append((server, asyncio.get_running_loop(), stop))
    ready.set()
    await stop.wait()
    listening.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Asked:
    first = (await reader.readline()).decode().split()
    if len(first) < 2:
        raise ConnectionError
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(first[0], first[1], headers, json.loads(content) if content else {})
