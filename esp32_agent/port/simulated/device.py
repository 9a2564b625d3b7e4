"""One simulated device: the real agent on a simulated port, switched on again after each power cut; its account."""

import hashlib
import json
import time
from typing import Any

from esp32_agent.core.agent import IDLE, SEND, START, Agent
from esp32_agent.core.message import Item
from esp32_agent.core.queue import Queue
from esp32_agent.core.session import Answer
from esp32_agent.core.settings import Settings
from esp32_agent.port.base import Port
from esp32_agent.port.simulated.faults import Faults, Reboot
from esp32_agent.port.simulated.machine import (
    Oscillator,
    SeededRunner,
    SimulatedBoard,
    SimulatedCamera,
    SimulatedClock,
    SimulatedNetwork,
    SimulatedPower,
    SimulatedStorage,
    golden_file,
)
from esp32_agent.port.simulated.web import SimulatedHttp

NEVER_US = 1 << 62
BOOT_S = 0.2
QUEUE_BYTES = 1 << 20

Identity = tuple[str, int]
"""Of a report: boot id and sequence."""


class Times:
    """When the fleet stops measuring, and when it gives up sending: monotonic seconds, earlier if told to stop."""

    def __init__(self, seconds: float, drain_s: float) -> None:
        self._drain_s = drain_s
        self._stops = time.monotonic() + seconds

    def stops_at(self) -> float:
        """No run begins after it."""
        return self._stops

    def ends_at(self) -> float:
        """No message is sent after it."""
        return self._stops + self._drain_s

    def stop(self) -> None:
        """Stops measuring now."""
        self._stops = min(self._stops, time.monotonic())


class Plan:
    """What every device of a fleet does."""

    def __init__(
        self, url: str, seed: int, period_s: int, send_every_s: float, windows: int, rates: dict[str, float]
    ) -> None:
        self.url, self.seed = url, seed
        self.period_s, self.send_every_s, self.windows = period_s, send_every_s, windows
        self.rates = rates


class Account:
    """What a device knows of its own reports.

    `made` says of each: "kept" in its queue, "cut" off by a power cut while it was stored, "dropped" by a full medium.
    """

    def __init__(self) -> None:
        self.device_id: str | None = None
        self.made: dict[Identity, str] = {}
        self.digests: dict[Identity, str] = {}
        self.acknowledged: set[Identity] = set()
        self.quarantined: dict[str, int] = {}
        self.conflicts = 0
        self.statuses: dict[int, int] = {}
        self.latencies_us: list[int] = []
        self.boots = 0
        self.waiting: list[Identity] = []


class Radio:
    """A radio that sleeps between messages, as on a battery; it outlives a reboot."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._wakes_at = 0.0

    def is_awake(self) -> bool:
        """Whether a message is due."""
        return time.monotonic() >= self._wakes_at

    def sleep(self) -> None:
        """Until the next message is due."""
        self._wakes_at = time.monotonic() + self._every_s


class WatchedAgent(Agent):
    """The agent, which notes each report that it makes. `drain` ends measuring and leaves the sending.

    While its radio sleeps it measures without a witness, and reports wait in the queue.
    """

    def __init__(self, port: Port, settings: Settings, account: Account, radio: Radio) -> None:
        super().__init__(port, settings)
        self._account, self._radio = account, radio

    def note(self, text: str) -> None:
        """Two hundred consoles would say too much."""

    def drain(self) -> None:
        """No further run. To be called before each step, since an enrolment leads to a run."""
        if self._run_at != NEVER_US:
            self._run_at = NEVER_US
            self._send_at = min(self._send_at, self.uptime.us())
        if self.state == START:
            self.state = SEND

    def _ask_for_run(self) -> Answer:
        if self._is_quiet():
            return Answer(0, {}, b"", "the radio sleeps")
        return super()._ask_for_run()

    def _report(self) -> None:
        run, before = self._run, self.queue.dropped
        made = {(run.boot_id, run.sequence): "cut"} if run is not None else {}
        self._account.made.update(made)
        super()._report()
        fate = "kept" if self.queue.dropped == before else "dropped"
        self._account.made.update(dict.fromkeys(made, fate))
        if self.state == SEND and self._is_quiet():
            self.state = IDLE

    def _stored(self, answer: Answer, count: int) -> None:
        super()._stored(answer, count)
        if self.queue.depth == 0:
            self._radio.sleep()

    def _is_quiet(self) -> bool:
        """Whether the radio sleeps, which it no longer does at the end."""
        return self._run_at != NEVER_US and not self._radio.is_awake()


class Device:
    """A device of the fleet with its place in it, its invite's code, and what it did."""

    def __init__(self, plan: Plan, number: int, code: str) -> None:
        self._plan = plan
        self._seed = f"{plan.seed}/{number}"
        self._number, self._code = number, code
        self.faults = Faults(plan.rates, self._seed)
        self._oscillator = Oscillator(self.faults)
        self._storage = SimulatedStorage(self.faults)
        self._storage.replace("golden.bin", golden_file())
        self._radio = Radio(plan.send_every_s)
        self.account = Account()

    def live(self, times: Times) -> None:
        """Measures and reports until the fleet stops, then sends what is left."""
        reason, is_done = "power_on", False
        while not is_done and time.monotonic() < times.ends_at():
            try:
                is_done = self._steps(self._boot(reason), times)
            except Reboot:
                reason = "brownout"
                time.sleep(BOOT_S)
        self._settle_account()

    def _steps(self, agent: WatchedAgent, times: Times) -> bool:
        """Until nothing is left to send, or the time is over."""
        while (now := time.monotonic()) < times.ends_at():
            if now >= times.stops_at():
                agent.drain()
                if agent.state == IDLE and agent.queue.depth == 0:
                    break
            agent.step()
        return True

    def _boot(self, reason: str) -> WatchedAgent:
        self.account.boots += 1
        clock, power = SimulatedClock(self._oscillator), SimulatedPower()
        port = Port(
            clock=clock,
            network=SimulatedNetwork(self._seed),
            http=SimulatedHttp(self._plan.url, clock, self._storage, self.faults, self._seen),
            storage=self._storage,
            power=power,
            runner=SeededRunner(clock, power, self._seed),
            camera=SimulatedCamera(),
            board=SimulatedBoard(self._number, reason),
        )
        settings = Settings(
            invite=self._code,
            name=f"simulator {self._number}",
            period_s=self._plan.period_s,
            windows=self._plan.windows,
            window_s=0,
            warmup=1,
            queue_bytes=QUEUE_BYTES,
            batch_reports=32,
            batch_bytes=40_000,
            start_attempts=1,
            retry_first_ms=500,
            retry_most_ms=4000,
            timeout_s=10,
        )
        return WatchedAgent(port, settings, self.account, self._radio)

    def _seen(self, path: str, body: bytes, status: int, data: bytes, us: int) -> None:
        account = self.account
        account.latencies_us.append(us)
        account.statuses[status] = account.statuses.get(status, 0) + 1
        if path == "/v1/devices/claim":
            if status in (200, 201):
                account.device_id = json.loads(data)["device_id"]
        elif path.endswith("/measurements") and status == 200:
            self._answered(json.loads(body)["reports"], json.loads(data)["reports"])

    def _answered(self, sent: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        account = self.account
        for each, answer in zip(sent, answers, strict=True):
            report = each["report"]
            identity = (report["boot_id"], report["sequence"])
            account.digests[identity] = digest(report)
            if answer["state"] == "conflict":
                account.conflicts += 1
                continue
            account.acknowledged.add(identity)
            if answer["state"] == "quarantined" and not answer["duplicate"]:
                for reason in answer["reasons"]:
                    account.quarantined[reason] = account.quarantined.get(reason, 0) + 1

    def _settle_account(self) -> None:
        """What still waits in the queue."""
        self._storage.is_cut = False
        records = Queue(self._storage, QUEUE_BYTES).batch(1_000_000, 1 << 30)
        self.account.waiting = [(item.boot_id, item.sequence) for item in map(Item, records)]


def digest(report: dict[str, Any]) -> str:
    """Of a report, however its JSON is written."""
    text = json.dumps(report, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
