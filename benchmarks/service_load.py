"""How many jobs per second the service takes, beside an endpoint of FastAPI that does nothing.

    python -m benchmarks.service_load --database postgresql+psycopg://user@host/empty --redis redis://host:6379/0

Two processes of the API on a database of their own are asked by a third process over connections that stay open; each
connection sends its next request when it has its answer. Rounds of the service and of the bare endpoint take turns; the
figures are medians over rounds.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from urllib.parse import urlsplit

from fastapi import FastAPI, Request

import migrations
from benchmarks.document import write

LISTENS = re.compile(r"OptiGPU listens on (http://\S+)|Uvicorn running on (http://\S+)")
STARTS_WITHIN_S, ENDS_WITHIN_S = 60.0, 30.0
MANY = "999999999/second"
PROCESSES = 2
PER_S, P99_MS = 400.0, 50.0
"""The goals."""
JOB = {"workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}, "model": "preset:gpt2"}


@dataclass(frozen=True)
class Figures:
    """One round: requests per second, and the 50th and 99th percentile of their times."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    refused: int


def bare() -> FastAPI:
    """An application that reads a body and answers a constant."""
    app = FastAPI()

    @app.post("/v1/jobs", status_code=202)
    async def take(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    return app


def main() -> None:
    """Runs the rounds and prints each, then the medians as JSON."""
    options = _options()
    if options.fire:
        print(json.dumps(asdict(asyncio.run(_fire(options.fire, options.connections, options.seconds)))))
        return
    migrations.upgrade(options.database)
    variables = {
        "OPTIGPU_DATABASE_URL": options.database,
        "OPTIGPU_REDIS_URL": options.redis,
        "OPTIGPU_RATE_LIMIT": MANY,
        "OPTIGPU_LOG_LEVEL": "INFO",
    }
    api = ["-m", "api", "--port", "0"]
    empty = ["-m", "uvicorn", "--factory", "benchmarks.service_load:bare", "--port", "0", "--no-access-log"]
    rounds: dict[str, list[Figures]] = {"service": [], "bare": []}
    with ExitStack() as running:
        urls = {
            name: [running.enter_context(_started(command, variables)) for _ in range(PROCESSES)]
            for name, command in (("service", api), ("bare", empty))
        }
        for _ in range(options.rounds):
            for name, found in rounds.items():
                found.append(_round(urls[name], options))
                print(name, found[-1], file=sys.stderr)
    figures: dict[str, object] = {name: _medians(found) for name, found in rounds.items()}
    shared = (
        f"{PROCESSES} processes of the API, the database and the one that asks share {os.cpu_count()} cores"
    )
    figures |= {"shared": shared, "goals": {"requests_per_s": PER_S, "p99_ms": P99_MS}}
    if options.output:
        write(options.output, "service_load", figures)
    print(json.dumps(figures, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--database", help="an empty database of PostgreSQL; it is filled")
    parser.add_argument("--redis", help="a Redis database")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a round is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--fire", nargs="+", metavar="URL", help="be the process that sends the requests")
    options = parser.parse_args()
    if not options.fire and not (options.database and options.redis):
        parser.error("name --database and --redis")
    return options


@contextmanager
def _started(command: Sequence[str], variables: dict[str, str]) -> Iterator[str]:
    """The address of a server that runs as long as the block lasts."""
    with NamedTemporaryFile("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield _address(process, output.name)
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)


def _address(process: subprocess.Popen[bytes], output: str) -> str:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := LISTENS.search(Path(output).read_text()):
            return found[1] or found[2]
        time.sleep(0.1)
    raise SystemExit(f"A server did not start:\n{Path(output).read_text()}")


def _round(urls: Sequence[str], options: argparse.Namespace) -> Figures:
    command = [sys.executable, "-m", "benchmarks.service_load", "--fire", *urls]
    command += ["--connections", str(options.connections), "--seconds", str(options.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Figures(**json.loads(done.stdout))


def _medians(rounds: Sequence[Figures]) -> dict[str, float]:
    return {name: round(median(getattr(each, name) for each in rounds), 2) for name in asdict(rounds[0])}


async def _fire(urls: Sequence[str], connections: int, seconds: float) -> Figures:
    """Half a second of it is not counted: connections open, and threads start."""
    begin = time.perf_counter() + 0.5
    end = begin + seconds
    senders = (_send(urls[number % len(urls)], begin, end) for number in range(connections))
    sent = [each for one in await asyncio.gather(*senders) for each in one]
    times = sorted(taken for _, taken in sent)
    return Figures(
        requests_per_s=len(times) / seconds,
        p50_ms=1000 * times[len(times) // 2],
        p99_ms=1000 * times[int(0.99 * len(times))],
        refused=sum(status != 202 for status, _ in sent),
    )


async def _send(url: str, begin: float, end: float) -> list[tuple[int, float]]:
    """The status and the seconds of each request that began and ended within the time."""
    address = urlsplit(url)
    body = json.dumps(JOB).encode()
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    found = []
    while (began := time.perf_counter()) < end:
        writer.write(request)
        headers = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", headers)
        await reader.readexactly(int(length[1]) if length else 0)
        ended = time.perf_counter()
        if began >= begin and ended <= end:
            found.append((int(headers.split(b" ", 2)[1]), ended - began))
    writer.close()
    return found


if __name__ == "__main__":
    main()
