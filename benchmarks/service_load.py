"""`python -m benchmarks.service_load`: how many jobs a second the service takes, beside an endpoint that does nothing.

Two processes of the API on a PostgreSQL database of their own, and on Redis, are asked by a third process over
connections that stay open; each connection sends its next request when it has its answer. Rounds of the service and of
a bare FastAPI endpoint take turns; the figures are medians over rounds. Goals: 400 jobs/s, 99 of 100 within 50 ms. Exit
status 0 if both are met, else 1.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.document import write
from benchmarks.http_load import Ask, Order, Served, load
from benchmarks.own_postgresql import SERVER, api_on, bare_endpoint, own_database
from optigpu.vocabulary import OptiGPUError

PROCESSES = 2
PER_S, P99_S = 400.0, 0.05
"""The goals."""
JOB = {"workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}, "model": "preset:gpt2"}


def main() -> int:
    """Runs the rounds and prints each, then the medians as JSON."""
    options = _options()
    rounds: dict[str, list[Served]] = {"service": [], "bare": []}
    with own_database(options.server) as database, ExitStack() as running:
        service = [running.enter_context(api_on(database, options.redis)) for _ in range(PROCESSES)]
        bare = [running.enter_context(bare_endpoint()) for _ in range(PROCESSES)]
        for _ in range(options.rounds):
            for (name, found), urls in zip(rounds.items(), (service, bare), strict=True):
                found.append(_round(urls, options))
                print(name, found[-1], file=sys.stderr)
    figures: dict[str, object] = {name: _medians(found) for name, found in rounds.items()}
    shared = (
        f"{PROCESSES} processes of the API, the database and the one that asks share {os.cpu_count()} cores"
    )
    figures |= {"shared": shared, "goals": {"per_s": PER_S, "p99_s": P99_S}}
    if options.output:
        write(options.output, "service_load", figures)
    print(json.dumps(figures, indent=2))
    taken = _medians(rounds["service"])
    return 0 if taken["per_s"] >= PER_S and taken["p99_s"] <= P99_S else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_load", description=__doc__)
    parser.add_argument("--server", default=SERVER, help="a PostgreSQL server on which databases may be made")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0", help="a Redis database")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a round is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    return parser.parse_args()


def _round(urls: list[str], options: argparse.Namespace) -> Served:
    asks = (Ask(path="/v1/jobs", method="POST", body=json.dumps(JOB)),)
    order = Order(urls=tuple(urls), asks=asks, connections=options.connections, seconds=options.seconds)
    served = load(order)
    if set(served.statuses) != {"202"}:
        raise OptiGPUError(f"Jobs were refused: {served.statuses}.")
    return served


def _medians(rounds: list[Served]) -> dict[str, float]:
    return {name: median(getattr(each, name) for each in rounds) for name in ("per_s", "p50_s", "p99_s")}


if __name__ == "__main__":
    sys.exit(main())
