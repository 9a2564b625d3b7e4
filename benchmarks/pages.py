"""`python -m benchmarks.pages`: the pages over many results: bytes sent, time to answer, first paint.

It fills a PostgreSQL database of its own with seeded results, starts `python -m api` on it and asks for each page on
loopback with gzip. The service keeps no page: each answer is read from the database and rendered anew, and the boards
and the front are asked each time with a filter that was not asked for before. One request of each page, in which
templates are compiled, comes first and is not counted. A bare FastAPI endpoint is asked in the same run. Goals: the
first page with all of its files at most 60 kB, half of the answers within 50 ms, first contentful paint in Chromium
within 300 ms. Exit status 0 if all are met, else 1.
"""

import argparse
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from benchmarks.made_up import Made
from benchmarks.many_results import fill
from benchmarks.own_postgresql import SERVER, api_on, bare_endpoint, own_database
from optigpu.http_clients import http_client
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError

CONFIGURATIONS, RESULTS = 2_000, 1_000_000
MOST_BYTES, WITHIN_S, PAINT_S = 60_000, 0.05, 0.3
"""The goals."""
TIMES = 30
GZIP = {"Accept-Encoding": "gzip", "Accept": "text/html"}
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@dataclass(frozen=True)
class Row:
    """One page: the bytes of its answer, and seconds until it was there."""

    what: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p90_s(self) -> float:
        return sorted(self.seconds)[int(0.9 * len(self.seconds))]


def main() -> int:
    """Measures and prints the table and the goals."""
    options = _options()
    try:
        with own_database(options.server) as url:
            begun = time.monotonic()
            made = fill(url.replace("+psycopg", ""), options.configurations, options.results)
            console(stderr=True).print(
                f"{options.results:,} results made in {time.monotonic() - begun:.0f} s"
            )
            with api_on(url) as service, bare_endpoint() as bare:
                address = service.address
                rows = [_row("a bare endpoint, 50 kB", bare.address, {"/": {}}), *_rows(address, made)]
                first, painted = _first_page(address), _painted(address)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    console().print(_table(rows))
    goals = list(_goals(rows, first, painted))
    for met, sentence in goals:
        console().print(f"{'met' if met else 'NOT MET':7}  {sentence}", markup=False)
    return 0 if all(met for met, _ in goals) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--server", default=SERVER, help="a PostgreSQL server on which databases may be made")
    parser.add_argument("--configurations", type=int, default=CONFIGURATIONS)
    parser.add_argument("--results", type=int, default=RESULTS)
    return parser.parse_args()


def _rows(address: str, made: Made) -> Iterator[Row]:
    board = made.digests[0]
    pages: dict[str, dict[str, Mapping[str, str | int]]] = {
        "/": {"/": {}},
        "/, one model": {"/": {"model": made.models[1]}},
        "/, one board": {"/": {"workload": board}},
        "/pareto": {"/pareto": {"workload": board}},
        "/hardware": {"/hardware": {}},
    }
    for what, asked in pages.items():
        yield _row(what, address, asked)


def _row(what: str, address: str, asked: Mapping[str, Mapping[str, str | int]]) -> Row:
    """Each time with another limit of the divergence, where the page has one."""
    ((path, query),) = asked.items()
    filtered = path in ("/", "/pareto") and what != "a bare endpoint, 50 kB"
    sizes, seconds = [], []
    with http_client(address, headers=GZIP, timeout=60) as client:
        client.get(path, params=query)
        for number in range(TIMES):
            asked_now = {**query, "max_kld": 1000 + number} if filtered else query
            begun = time.perf_counter()
            with client.stream("GET", path, params=asked_now) as answer:
                if answer.status_code != 200:
                    raise OptiGPUError(f"{what} was refused with status {answer.status_code}.")
                sizes.append(sum(len(part) for part in answer.iter_raw()))
            seconds.append(time.perf_counter() - begun)
    return Row(what, max(sizes), tuple(seconds))


def _first_page(address: str) -> int:
    """The bytes of the first page and of the files that it loads, as they are sent."""
    with http_client(address, headers=GZIP, timeout=60) as client:
        files = sorted(set(re.findall(r'(?:href|src)="(/static/[^"]+)"', client.get("/").text)))
        total = 0
        for path in ("/", *files):
            with client.stream("GET", path) as answer:
                total += sum(len(part) for part in answer.iter_raw())
    return total


def _painted(address: str) -> float | None:
    """Seconds until Chromium shows the first page, the best of five; None without Chromium."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        return None
    from playwright.sync_api import sync_playwright  # here, because it is of the extra dev

    entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(QUIET))
        found = []
        for _ in range(5):
            with browser.new_context() as context, context.new_page() as page:
                page.goto(address, wait_until="networkidle")
                found.append(float(page.evaluate(entry)))
        browser.close()
    return min(found)


def _table(rows: list[Row]) -> Table:
    table = Table(title="The pages over many results")
    for heading in ("page", "bytes (gzip)", "p50 (ms)", "p90 (ms)"):
        table.add_column(heading, justify="left" if heading == "page" else "right")
    for row in rows:
        table.add_row(row.what, f"{row.bytes:,}", f"{1e3 * row.median_s:.1f}", f"{1e3 * row.p90_s:.1f}")
    return table


def _goals(rows: list[Row], first: int, painted: float | None) -> Iterator[tuple[bool, str]]:
    yield first <= MOST_BYTES, f"the first page with its files: {first:,} bytes (goal {MOST_BYTES:,})"
    for row in rows[1:]:
        ms = f"{1e3 * row.median_s:.1f} ms (goal {1e3 * WITHIN_S:.0f})"
        yield row.median_s <= WITHIN_S, f"{row.what}: half of the answers within {ms}"
    if painted is None:
        yield False, "first contentful paint: not measured, because there is no Chromium"
    else:
        yield painted <= PAINT_S, f"first contentful paint: {1e3 * painted:.0f} ms (goal {1e3 * PAINT_S:.0f})"


if __name__ == "__main__":
    sys.exit(main())
