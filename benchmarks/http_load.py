"""`python -m benchmarks.http_load`: requests from a process of its own, over connections that stay open.

It reads a JSON document from stdin (`Order`) and writes one to stdout (`Served`). Without a rate each connection sends
its next request when it has an answer. With one, requests have moments at which they are to be sent, and a latency
counts from that moment: a server that stands still delays all that were due meanwhile.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from subprocess import run
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field

from optigpu.vocabulary import Frozen, OptiGPUError

ENDS_AFTER_S = 60.0
"""How long an answer may take once no more requests are sent."""


class Ask(Frozen):
    """One request."""

    path: str
    method: str = "GET"
    headers: dict[str, str] = Field(default_factory=dict)
    body: str = ""


class Order(Frozen):
    """What to send: the requests in turn, from the beginning again if `repeated`; `rate` is in requests per second."""

    urls: tuple[str, ...]
    asks: tuple[Ask, ...]
    connections: int = 16
    seconds: float = 10.0
    rate: float | None = None
    repeated: bool = True
    seed: int = 0


class Served(Frozen):
    """What came back. Latencies are in seconds, null if nothing was answered."""

    requests: int
    per_s: float
    p50_s: float | None
    p99_s: float | None
    bytes_each: float
    statuses: dict[str, int]


def load(order: Order) -> Served:
    """Sends the requests from another process. Raises OptiGPUError if it fails."""
    command = [sys.executable, "-m", "benchmarks.http_load"]
    ended = run(command, input=order.model_dump_json(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OptiGPUError(f"The load could not be sent: {ended.stderr.strip().splitlines()[-1:]}")
    return Served.model_validate_json(ended.stdout)


class _Sender:
    def __init__(self, order: Order) -> None:
        self._order = order
        asks = cycle(order.asks) if order.repeated else iter(order.asks)
        self._due = self._moments(asks)
        self.latencies: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.bytes = 0

    def _moments(self, asks: Iterator[Ask]) -> Iterator[tuple[float, Ask]]:
        """Each request with the moment at which it is to be sent; seconds after the beginning."""
        at, random_ = 0.0, random.Random(self._order.seed)
        for ask in asks:
            if self._order.rate:
                at += random_.expovariate(self._order.rate)
            yield at, ask

    async def send_all(self) -> float:
        """Returns the seconds that it took."""
        self._begun = time.perf_counter()
        urls = cycle(self._order.urls)
        await asyncio.gather(*(self._connection(next(urls)) for _ in range(self._order.connections)))
        return time.perf_counter() - self._begun

    async def _connection(self, url: str) -> None:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for at, ask in self._due:
            now = time.perf_counter() - self._begun
            if max(now, at) > self._order.seconds:
                break
            if at > now:
                await asyncio.sleep(at - now)
            due = self._begun + at if self._order.rate else time.perf_counter()
            writer.write(_written(ask, address.netloc))
            status, size = await asyncio.wait_for(_answer(reader), ENDS_AFTER_S)
            self.latencies.append(time.perf_counter() - due)
            self.statuses[status] += 1
            self.bytes += size
        writer.close()


def _written(ask: Ask, host: str) -> bytes:
    headers = {"Host": host, **ask.headers}
    if ask.body:
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(ask.body.encode()))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{ask.method} {ask.path} HTTP/1.1\r\n{lines}\r\n{ask.body}".encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, int]:
    """The status, and the size of the body, which must say its length or come in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head[9:12].decode()
    if b"transfer-encoding: chunked" in head:
        return status, await _chunks(reader)
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    size = int(length or 0)
    if size and status != "304":
        await reader.readexactly(size)
    return status, size


async def _chunks(reader: asyncio.StreamReader) -> int:
    total = 0
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        await reader.readexactly(size + 2)
        total += size
    await reader.readexactly(2)
    return total


def _served(sender: _Sender, seconds: float) -> Served:
    latencies: Sequence[float] = sender.latencies
    p50, p99 = np.percentile(latencies, (50, 99)) if latencies else (None, None)
    return Served(
        requests=len(latencies),
        per_s=len(latencies) / seconds,
        p50_s=p50,
        p99_s=p99,
        bytes_each=sender.bytes / max(1, len(latencies)),
        statuses=dict(sender.statuses),
    )


def main() -> None:
    """Reads the order, sends it, writes what came back."""
    sender = _Sender(Order.model_validate_json(sys.stdin.read()))
    seconds = asyncio.run(sender.send_all())
    sys.stdout.write(_served(sender, seconds).model_dump_json())


if __name__ == "__main__":
    main()
