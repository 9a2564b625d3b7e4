"""`python -m benchmarks.forged_reports --reports 100000`: how many forged reports the service accepts. The goal: none.

Forged, replayed, reordered and bit-flipped requests of many kinds go over HTTP to a service of its own, a process with
a SQLite file, from several devices at once. Between them go honest messages, whose reports must be accepted once each.
At the end the service lists what it has stored: the honest reports, and nothing else. It ends with status 1 otherwise.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.progress import Progress
from rich.table import Table

from api.commands import invite
from benchmarks.document import write
from benchmarks.forgeries import CLAIM, KINDS, World
from benchmarks.own_postgresql import api_on
from benchmarks.signing_device import JSON_TYPE, Device, Identity, Request, claim, manifest, rotation
from optigpu.documents.devices import DeviceSource
from optigpu.report.formats import console
from optigpu.store import devices
from optigpu.store.database import Database
from optigpu.vocabulary import OptiGPUError

ANSWER_WITHIN_S = 30.0
TRIES = 5


@dataclass(frozen=True)
class Answer:
    """The status, and the document."""

    status: int
    document: dict[str, object]

    @property
    def takes(self) -> int:
        """The reports (or devices, runs, keys) that this answer says were newly taken."""
        if self.status not in (200, 201):
            return 0
        reports = self.document.get("reports")
        if not isinstance(reports, list):
            return 1
        return sum(each["state"] != "conflict" and not each["duplicate"] for each in reports)


@dataclass
class Service:
    """A running service; each thread keeps a connection of its own."""

    url: str
    database: Database
    _kept: threading.local = field(default_factory=threading.local)
    _opened: list[http.client.HTTPConnection] = field(default_factory=list)

    def close(self) -> None:
        """Closes the connections of all threads."""
        for connection in self._opened:
            connection.close()
        self.database.close()

    def send(self, request: Request, method: str = "POST") -> Answer:
        """The answer; a connection that broke is made again, a few times."""
        for _ in range(TRIES):
            try:
                return self._sent(request, method)
            except (OSError, http.client.HTTPException):
                self._kept.connection = None
        raise OptiGPUError("The service does not answer any more, so nothing was found out.")

    def _sent(self, request: Request, method: str) -> Answer:
        connection = getattr(self._kept, "connection", None)
        if connection is None:
            address = urlsplit(self.url)
            connection = http.client.HTTPConnection(
                address.hostname or "", address.port, timeout=ANSWER_WITHIN_S
            )
            self._kept.connection = connection
            self._opened.append(connection)
        connection.putrequest(method, request.path)
        for name, value in (*request.headers, ("Content-Length", str(len(request.body)))):
            connection.putheader(name, value)
        connection.endheaders(request.body)
        answer = connection.getresponse()
        return Answer(answer.status, json.loads(answer.read()))


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """A service of its own without a worker, which counts no calls."""
    url = f"sqlite:///{folder / 'optigpu.db'}"
    with (
        api_on(url, OPTIGPU_DATA_DIR=str(folder)) as address,
        closing(Service(address, Database(url))) as service,
    ):
        yield service


BETWEEN = 19
"""Forged requests for each honest one."""
REMEMBERED = 500
"""Accepted requests that a forger may send again."""
AHEAD = 8
"""Honest messages that are signed before one of them is sent."""
HONEST = "honest"
PAGE = 200
DEVICES_EACH = 3
"""Devices that are enrolled for each one that is forged."""


@dataclass
class Found:
    """What came of the requests, by kind."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    accepted: Counter[str] = field(default_factory=Counter)
    honest: set[Identity] = field(default_factory=set)
    lost: int = 0

    @property
    def forged(self) -> int:
        """The forged requests that were sent."""
        return sum(counts.total() for kind, counts in self.statuses.items() if kind != HONEST)

    def note(self, kind: str, answer: Answer) -> None:
        """The answer to a forged request."""
        self.statuses.setdefault(kind, Counter())[answer.status] += 1
        self.accepted[kind] += answer.takes

    def add(self, other: "Found") -> None:
        """What another device's thread has found."""
        for kind, counts in other.statuses.items():
            self.statuses.setdefault(kind, Counter()).update(counts)
        self.accepted.update(other.accepted)
        self.honest |= other.honest
        self.lost += other.lost


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if the goal is missed, 2 if it could not be found out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forged_reports", description=__doc__)
    parser.add_argument("--reports", type=int, default=100_000, help="forged requests; 100000")
    parser.add_argument("--devices", type=int, default=4, help="devices that are forged at once; 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as service:
            begun = time.monotonic()
            found = _forge(service, options.reports, options.devices, options.seed)
            seconds = time.monotonic() - begun
            enrolled, stored = _stored(service)
            wrong = len(stored ^ found.honest) + abs(enrolled - DEVICES_EACH * options.devices)
    except OptiGPUError as error:
        print(error, file=sys.stderr)
        return 2
    _print(found, wrong, seconds)
    if options.output:
        figures = {
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "honest_reports": len(found.honest),
            "honest_lost": found.lost,
            "stored_otherwise": wrong,
            "kinds": {
                kind: {"accepted": found.accepted[kind], "statuses": dict(sorted(counts.items()))}
                for kind, counts in sorted(found.statuses.items())
            },
        }
        write(options.output, "forged_reports", figures)
    return 1 if wrong or found.lost or found.accepted.total() else 0


def _forge(service: Service, count: int, devices_count: int, seed: int) -> Found:
    """Every device has a thread of its own, which forges what it would say."""
    body = json.dumps(manifest()).encode()
    if service.send(Request("/v1/edge/models", (JSON_TYPE,), body)).status != 201:
        raise OptiGPUError("The service did not take the model, so nothing was found out.")
    worlds = [_world(service, random.Random(f"{seed}-{number}")) for number in range(devices_count)]
    shares = [count // devices_count + (number < count % devices_count) for number in range(devices_count)]
    total = Found()
    with Progress(console=console(stderr=True)) as progress, ThreadPoolExecutor(devices_count) as pool:
        task = progress.add_task("forging", total=count)

        def advance(by: int) -> None:
            progress.advance(task, by)

        pairs = zip(worlds, shares, strict=True)
        for each in [pool.submit(_forge_one, service, world, share, advance) for world, share in pairs]:
            total.add(each.result())
    return total


def _forge_one(service: Service, world: World, count: int, advance: Callable[[int], None]) -> Found:
    """Forged requests, and after some of each round the honest one that they are made from. Honest ones are late or
    early: they are signed in one order and sent in another."""
    found, names, waiting = Found(), sorted(KINDS), [world.honest]
    while found.forged < count:
        waiting += [world.device.honest() for _ in range(AHEAD - len(waiting))]
        world.honest = waiting.pop(world.rng.randrange(len(waiting)))
        kinds = world.rng.choices(names, k=min(BETWEEN, count - found.forged))
        place = world.rng.randrange(len(kinds))
        for index, kind in enumerate(kinds):
            if index == place:
                _send_honest(service, world, found)
            found.note(kind, service.send(KINDS[kind](world)))
        advance(len(kinds))
    return found


def _send_honest(service: Service, world: World, found: Found) -> None:
    identities = world.honest.identities
    answer = service.send(world.honest)
    found.statuses.setdefault(HONEST, Counter())[answer.status] += 1
    if answer.takes == len(identities):
        found.honest |= identities
    else:
        found.lost += len(identities)
    world.seen = [*world.seen[-REMEMBERED:], world.honest]


def _world(service: Service, rng: random.Random) -> World:
    """A device that has changed its key, another one, and one that was revoked."""
    device, code = _enrolled(service, rng)
    replaced = Device(device.id, device.key, random.Random(rng.random()), boot="f" * 16)
    new_key = rng.randbytes(32)
    changed = service.send(device.signed("key", rotation(device.key, new_key, rng.randbytes(16).hex())))
    device.key, device.version = new_key, 2
    other, revoked = _enrolled(service, rng)[0], _enrolled(service, rng)[0]
    with service.database.write() as session:
        devices.revoke(session, revoked.id)
    heartbeat = device.signed("measurements", device.message(0)[0])
    if (changed.status, service.send(heartbeat).status) != (200, 200):
        raise OptiGPUError("A device could not change its key, so nothing was found out.")
    return World(rng, device, other, revoked, replaced, code, device.honest(), [heartbeat])


def _enrolled(service: Service, rng: random.Random) -> tuple[Device, str]:
    code, _ = invite(service.database, name=None, source=DeviceSource.DEVICE, lasts=timedelta(days=1))
    key = rng.randbytes(32)
    body = json.dumps(claim(code.text, key, rng.randbytes(16).hex())).encode()
    answer = service.send(Request(CLAIM, (JSON_TYPE,), body))
    if answer.status != 201:
        raise OptiGPUError("A device could not enrol, so nothing was found out.")
    return Device(str(answer.document["device_id"]), key, rng), code.text


def _stored(service: Service) -> tuple[int, set[Identity]]:
    """How many devices the service lists, and every report."""
    found, ids = set(), [str(each["id"]) for each in _listed(service, "/v1/devices", "devices")]
    for device_id in ids:
        for each in _listed(service, f"/v1/devices/{device_id}/reports", "reports"):
            document = each["document"]
            found.add((device_id, str(document["boot_id"]), int(document["sequence"])))
    return len(ids), found


def _listed(service: Service, path: str, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a list, page by page."""
    following: object = None
    while True:
        query = f"?limit={PAGE}" + (f"&cursor={following}" if following else "")
        answer = service.send(Request(path + query, (), b""), "GET")
        rows, following = answer.document.get(name), answer.document.get("next_cursor")
        if not isinstance(rows, list):
            raise OptiGPUError(f"The service did not list {name}, so nothing was found out.")
        yield from rows
        if not following:
            return


def _print(found: Found, wrong: int, seconds: float) -> None:
    table = Table("kind", "sent", "answers", "accepted")
    for kind, counts in sorted(found.statuses.items()):
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        accepted = len(found.honest) if kind == HONEST else found.accepted[kind]
        table.add_row(kind, str(counts.total()), answers, str(accepted))
    console().print(table)
    rate = (found.forged + found.statuses[HONEST].total()) / seconds
    console().print(
        f"Forged requests: {found.forged}, accepted: {found.accepted.total()} (goal: 0). Honest reports: "
        f"{len(found.honest) + found.lost}, accepted once: {len(found.honest)} (goal: all). Stored otherwise than they "
        f"should be: {wrong} (goal: 0). {seconds:.0f} s, {rate:.0f} requests/s."
    )


if __name__ == "__main__":
    sys.exit(main())
