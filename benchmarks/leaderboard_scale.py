"""`python -m benchmarks.leaderboard_scale`: the leaderboard over a million results.

For each size it fills a PostgreSQL database of its own with seeded results, starts two processes of the API on it, as
`service_load` does, and asks from another process: for common pages (few, again and again), for the same with the tags
that the client has, and for pages that nobody asked for before, as fast as answers come and at 200 requests a second.
The first of those find a database that reads from the disk; they have a row of their own, and the goals are for a
service that has run for that long. A bare FastAPI endpoint that returns 52 kB as a dict, in as many processes, is asked
in the same run. Goals: common pages 2,000 requests/s; new pages 300 requests/s, and 99 of 100 within 25 ms at 200
requests/s. Exit status 0 if all are met, else 1.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlencode

import psycopg

from benchmarks.document import write
from benchmarks.http_load import Ask, Order, Served, load
from benchmarks.many_results import BOARDS_OF_MODEL, METRIC_NAMES, TECHNIQUES, Made, fill
from benchmarks.own_postgresql import SERVER, api_on, bare_endpoint, own_database
from optigpu.http_clients import http_client
from optigpu.report.formats import Grid, columns, console, terminal
from optigpu.vocabulary import OptiGPUError

SIZES = ((2_000, 1_000_000),)
"""Configurations and results."""
COMMON, NEW, NEW_AT_200, RATE = 2000.0, 300.0, 0.025, 200.0
"""The goals."""
CONNECTIONS = 16


@dataclass(frozen=True)
class Row:
    """What one kind of request came to, on one size."""

    configurations: int
    results: int
    what: str
    served: Served


def main() -> int:
    """Measures and prints the table and the goals."""
    options = _options()
    sizes = [tuple(map(int, size.split(":"))) for size in options.sizes]
    rows: list[Row] = []
    settings = _settings(options.server)
    try:
        for configurations, results in sizes:
            with own_database(options.server) as url:
                begun = time.monotonic()
                made = fill(url, configurations, results)
                console(stderr=True).print(f"{results:,} results made in {time.monotonic() - begun:.0f} s")
                rows += _measured(url, made, (configurations, results), options)
                if options.output:
                    figures = {
                        "processes": options.processes,
                        "postgresql": settings,
                        "rows": [_plain(row) for row in rows],
                    }
                    write(options.output, "leaderboard_scale", figures)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    console().print(terminal(_table(rows, options.processes, settings)))
    goals = list(_goals(rows))
    for met, sentence in goals:
        console().print(f"{'met' if met else 'NOT MET':7}  {sentence}", markup=False)
    return 0 if all(met for met, _ in goals) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard_scale", description=__doc__)
    parser.add_argument("--server", default=SERVER, help="a PostgreSQL server on which databases may be made")
    parser.add_argument("--processes", type=int, default=2, help="of the API, and of the bare endpoint")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of request")
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds of the first new pages")
    sizes = [f"{configurations}:{results}" for configurations, results in SIZES]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="CONFIGURATIONS:RESULTS")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def _measured(url: str, made: Made, size: tuple[int, int], options: argparse.Namespace) -> list[Row]:
    common, new = _common(made), _new(made, seed=1)
    first, fast, steady = (new[number::3] for number in range(3))

    def row(what: str, order: Order) -> Row:
        return Row(*size, what, load(order))

    with ExitStack() as servers:
        processes = range(options.processes)
        urls = tuple(servers.enter_context(api_on(url)) for _ in processes)
        bare = tuple(servers.enter_context(bare_endpoint()) for _ in processes)
        tagged = _with_tags(urls[0], common)
        same = {"connections": CONNECTIONS, "seconds": options.seconds}
        rows = [
            row("a bare endpoint, 52 kB", Order(urls=bare, asks=(Ask(path="/"),), **same)),
            row("common pages", Order(urls=urls, asks=common, **same)),
            row("common pages, unchanged", Order(urls=urls, asks=tagged, **same)),
            row(
                f"the first new pages, {options.warm_up:.0f} s",
                Order(urls=urls, asks=first, repeated=False, **same | {"seconds": options.warm_up}),
            ),
            row("new pages", Order(urls=urls, asks=fast, repeated=False, **same)),
            row(
                f"new pages at {RATE:.0f}/s", Order(urls=urls, asks=steady, repeated=False, rate=RATE, **same)
            ),
        ]
    if wrong := [each.what for each in rows if set(each.served.statuses) - {"200", "304"}]:
        raise OptiGPUError(f"Requests were refused: {', '.join(wrong)}.")
    return rows


def _common(made: Made) -> tuple[Ask, ...]:
    """What people ask for: the list, some boards, with and without compression."""
    queries = ["", *(f"?workload={digest}" for digest in made.digests[:8]), "?clean=true&format=csv"]
    plain = tuple(Ask(path=f"/v1/leaderboard{query}") for query in queries)
    return plain + tuple(ask.model_copy(update={"headers": {"Accept-Encoding": "gzip"}}) for ask in plain)


def _with_tags(address: str, asks: Sequence[Ask]) -> tuple[Ask, ...]:
    """The same with the tag of the answer that the client has."""
    tagged = []
    with http_client(address, timeout=60) as client:
        for ask in asks:
            headers = {"Accept-Encoding": "identity", "Accept": ""} | ask.headers
            tag = client.get(ask.path, headers=headers).headers["etag"]
            tagged.append(ask.model_copy(update={"headers": headers | {"If-None-Match": tag}}))
    return tuple(tagged)


def _new(made: Made, seed: int, count: int = 150_000) -> tuple[Ask, ...]:
    """Pages with filters that differ each time, of as many rows whether they are of one board or of several."""
    random_, asked = random.Random(seed), []
    for number in range(count):
        rows = random_.randint(5, 50)
        query: dict[str, object] = {"workload": random_.choice(made.digests), "limit": rows}
        if random_.random() < 0.2:  # the limit is that of each board
            query = {"model": random_.choice(made.models), "limit": max(1, rows // BOARDS_OF_MODEL)}
        if random_.random() < 0.3:
            query["technique"] = random_.choice(TECHNIQUES)
        if random_.random() < 0.3:
            query["hardware"] = random_.choice(made.hardware)
        if random_.random() < 0.3:
            query["metric"] = random_.choice(METRIC_NAMES)
        query |= {"min_top1": round(0.8 + 0.1 * random_.random(), 9), "max_kld": 1 + number}
        asked.append(Ask(path=f"/v1/leaderboard?{urlencode(query)}"))
    return tuple(asked)


def _plain(row: Row) -> dict[str, object]:
    return asdict(row) | {"served": row.served.model_dump()}


def _settings(server: str) -> dict[str, str]:
    """What decides how much of a large database PostgreSQL has at hand."""
    with psycopg.connect(server) as connection:
        found = {
            name: connection.execute(f"SHOW {name}").fetchone()
            for name in ("server_version", "shared_buffers")
        }
    return {name: str(row[0]) for name, row in found.items() if row}


def _table(rows: Sequence[Row], processes: int, settings: Mapping[str, str]) -> Grid:
    shared = (
        f"Processes of the API: {processes}. They, PostgreSQL ({settings['shared_buffers']} of shared buffers) and the "
        f"one that asks share {os.cpu_count()} cores."
    )
    shown = []
    for row in rows:
        served = row.served
        times = ("-" if each is None else f"{1000 * each:.1f}" for each in (served.p50_s, served.p99_s))
        sizes = f"{row.configurations:,}", f"{row.results:,}"
        shown.append((*sizes, row.what, f"{served.per_s:,.0f}", *times, f"{served.bytes_each:,.0f}"))
    headings = ("configurations:", "results:", "requests", "per s:", "p50 (ms):", "p99 (ms):", "bytes:")
    return Grid("The leaderboard over many results", columns(*headings), tuple(shown), (shared,))


def _goals(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Whether each goal is met, in a sentence."""
    for row in rows:
        served, size = row.served, f"{row.configurations:,} configurations"
        if row.what == "common pages":
            yield served.per_s >= COMMON, f"{size}: {served.per_s:,.0f} common pages/s (goal {COMMON:,.0f})"
        elif row.what == "new pages":
            yield served.per_s >= NEW, f"{size}: {served.per_s:,.0f} new pages/s (goal {NEW:,.0f})"
        elif row.what.startswith("new pages at") and served.p99_s is not None:
            yield (
                served.p99_s <= NEW_AT_200,
                f"{size}: 99% within {1000 * served.p99_s:.1f} ms at {RATE:.0f}/s (goal {1000 * NEW_AT_200:.0f})",
            )


if __name__ == "__main__":
    sys.exit(main())
