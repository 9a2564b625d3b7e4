"""`python -m benchmarks.devices`: 200 simulated devices through restarts of the service and of its database.

It starts a PostgreSQL server and a service of its own. While the devices measure, the service is ended by SIGTERM and
by SIGKILL, and PostgreSQL is shut down and then ended as by a crash; each is started again. Goals: no report is lost,
none is doubled, every device makes its reports. Exit status 0 if they are met, else 1.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.document import write
from optigpu.cli.device_sim import audited, fleet_grid, register_model
from optigpu.client import Client
from optigpu.edge.simulation.documents import FleetResult
from optigpu.edge.simulation.fleet import FleetPlan, read_faults, run_fleet
from optigpu.http_clients import http_client
from optigpu.report import console, terminal
from tests.servers.process import NoServerError, free_port, scratch_folder
from tests.servers.restartable import Program, postgres

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "OPTIGPU_EMBEDDED_WORKER": "false",
    "OPTIGPU_RATE_LIMIT": "100000/minute",
    "OPTIGPU_DEVICE_RATE_LIMIT": "1000/minute",
}
AWAY_S = 2.0
"""How long the service or its database stays away."""
LEAST_SHARE = 0.9
"""Of the reports that the rate promises: a device that waits for an answer measures later."""


@dataclass(frozen=True)
class Restart:
    """What was ended when, by which signal, and how long it took until it answered again."""

    at_s: float
    what: str
    signal: str
    away_s: float


@contextmanager
def service(database_url: str, folder: Path) -> Iterator[tuple[Program, str]]:
    """The service on a port that it keeps, and its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = dict(os.environ) | SETTINGS | {"OPTIGPU_DATABASE_URL": database_url}
    environment["OPTIGPU_DATA_DIR"] = str(folder)

    def start() -> subprocess.Popen[bytes]:
        with (folder / "service.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "api", "--port", str(port)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def answers() -> bool:
        try:
            with http_client(url, timeout=5) as http:
                return http.get("/readyz").is_success
        except httpx.TransportError:
            return False

    program = Program(start, answers)
    program.start()
    try:
        yield program, url
    finally:
        program.end(signal.SIGTERM)


def invited(database_url: str, count: int) -> list[str]:
    """Codes for so many devices."""
    command = ["api", "devices", "invite", "--simulator", "--expires", "1h", "--count", str(count)]
    environment = dict(os.environ) | {"OPTIGPU_DATABASE_URL": database_url}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def restarts(
    database: Program, api: Program, seconds: float, done: threading.Event, log: list[Restart]
) -> None:
    """Ends and starts each of them twice, evenly over the time."""
    turns = (
        (api, "service", signal.SIGTERM),
        (api, "service", signal.SIGKILL),
        (database, "PostgreSQL", signal.SIGINT),  # a fast shutdown
        (database, "PostgreSQL", signal.SIGQUIT),  # ends as by a crash, and recovers
    )
    begun = time.monotonic()
    for number, (program, what, how) in enumerate(turns, 1):
        if done.wait(begun + seconds * number / (len(turns) + 1) - time.monotonic()):
            return
        at = time.monotonic()
        program.end(how)
        time.sleep(AWAY_S)
        program.start()
        log.append(Restart(round(at - begun, 1), what, how.name, round(time.monotonic() - at, 2)))


def measured(options: argparse.Namespace, folder: Path) -> tuple[FleetResult, list[Restart], int]:
    """Runs the fleet; the result, the restarts, and the reports that the rate promises while everything is there."""
    plan = FleetPlan(
        url="",
        seconds=options.seconds,
        drain_s=60,
        period_s=1,
        send_every_s=options.send_every,
        seed=options.seed,
        faults=read_faults(options.faults),
    )
    log: list[Restart] = []
    done = threading.Event()
    with postgres() as (database, database_url), service(database_url, folder) as (api, url):
        plan = FleetPlan(**asdict(plan) | {"url": url})
        codes = invited(database_url, options.devices)
        with Client(url) as client:
            register_model(client)
            arguments = (database, api, options.seconds, done, log)
            breaker = threading.Thread(target=restarts, args=arguments)
            begun = time.monotonic()
            breaker.start()
            try:
                accounts = run_fleet(plan, codes)
            finally:
                done.set()
                breaker.join()
            seconds = time.monotonic() - begun
            found = audited(client, accounts, options.devices, seconds)
    late_s = (
        max(plan.period_s, plan.send_every_s) / 2
    )  # the mean of the moments at which devices are switched on
    there_s = options.seconds - late_s - sum(each.away_s for each in log)
    return found, log, int(options.devices * there_s / plan.period_s)


def main() -> int:
    """Measures, prints the account and the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they measure")
    parser.add_argument("--send-every", type=float, default=10.0, help="seconds between messages of a device")
    parser.add_argument("--faults", default="none", help="as of `optigpu device-sim`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    folder = Path(scratch_folder(None))
    try:
        found, log, promised = measured(options, folder)
    except NoServerError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder)
    goals = {
        "0 lost": found.lost + found.unstored == 0,
        "0 duplicated": found.duplicated == 0,
        "nothing else is wrong": found.is_right,
        "4 restarts": len(log) == 4,
        f"a report of each device each second while the service is there: {found.made}, promised {promised}": (
            found.made >= LEAST_SHARE * promised
        ),
    }
    screen = console()
    screen.print(terminal(fleet_grid(found)))
    for restart in log:
        screen.print(f"at {restart.at_s} s: {restart.what}, {restart.signal}, back after {restart.away_s} s")
    for goal, met in goals.items():
        screen.print(f"{'reached' if met else 'NOT reached'}: {goal}")
    if options.output:
        figures = {"result": found.model_dump(mode="json"), "restarts": [asdict(each) for each in log]}
        asked = {name: value for name, value in vars(options).items() if name != "output"}
        write(options.output, "devices", {"asked": asked, "promised": promised, **figures, "goals": goals})
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
