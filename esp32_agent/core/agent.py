"""The state machine: BOOT, CLAIM, START, MEASURE, REPORT, SEND, ROTATE, IDLE.

`step()` does what the state asks and goes on to the next state. Whatever must outlive a power cut lies in the storage
before the request that depends on it is sent, so that the agent may be cut off in any state.
"""

from esp32_agent.core import enrolment, message
from esp32_agent.core.enrolment import DONE, REFUSED, claim, public_id
from esp32_agent.core.keys import load_identity
from esp32_agent.core.measuring import measure, run_golden
from esp32_agent.core.message import Run, Writer, build
from esp32_agent.core.queue import Queue
from esp32_agent.core.session import Answer, Session
from esp32_agent.core.timing import Backoff, Stopwatch
from esp32_agent.port.base import Port, PortError

_RANGES = (
    ("period_s", 0, 31536000),
    ("windows", 1, 64),
    ("window_s", 0, 3600),
    ("warmup", 0, 10000),
    ("heartbeat_s", 1, 86400),
    ("timeout_s", 1, 300),
    ("queue_bytes", 4096, 1 << 30),
    ("batch_reports", 1, 32),
    ("batch_bytes", 1024, 49152),
    ("start_attempts", 1, 100),
    ("retry_first_ms", 1, 3600000),
    ("retry_most_ms", 1, 3600000),
)


class Settings:
    """The configuration, as far as it is the core's. Numbers are whole; `fault` says what is wrong with them."""

    def __init__(
        self,
        invite: str = "",
        name: str | None = None,
        golden: str = "golden.bin",
        period_s: int = 3600,
        windows: int = 5,
        window_s: int = 10,
        warmup: int = 5,
        heartbeat_s: int = 300,
        timeout_s: int = 30,
        queue_bytes: int = 65536,
        batch_reports: int = 8,
        batch_bytes: int = 4096,
        start_attempts: int = 3,
        retry_first_ms: int = 1000,
        retry_most_ms: int = 300000,
    ) -> None:
        self.invite = invite
        self.name = name
        self.golden = golden  # the file of golden inputs, as the storage names it
        self.period_s = period_s  # from the start of a run to the start of the next
        self.windows = windows
        self.window_s = window_s
        self.warmup = warmup
        self.heartbeat_s = heartbeat_s
        self.timeout_s = timeout_s  # of each step of a request
        self.queue_bytes = queue_bytes
        self.batch_reports = batch_reports  # in a message; the service takes 32
        self.batch_bytes = batch_bytes  # of the reports of a message, which lies in memory as a whole
        self.start_attempts = start_attempts  # to be given a run, before one is measured without a witness
        self.retry_first_ms = retry_first_ms
        self.retry_most_ms = retry_most_ms

    def fault(self) -> str | None:
        """A sentence about the first setting that is out of range; None where all are in range."""
        for name, least, most in _RANGES:
            value: object = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                return f"{name} must be a whole number from {least} to {most}."
        return None


BOOT = "boot"
CLAIM = "claim"
START = "start"
MEASURE = "measure"
REPORT = "report"
SEND = "send"
ROTATE = "rotate"
IDLE = "idle"

_LONGEST_SLEEP_MS = 60000  # the stopwatch must be read within half of the ticks' period


class Agent:
    def __init__(self, port: Port, settings: Settings) -> None:
        """Recovers the queue. Raises PortError where the storage cannot be read, ValueError for a wrong setting."""
        fault = settings.fault()
        if fault:
            raise ValueError(fault)
        self.state = BOOT
        self.port = port
        self.settings = settings
        self.uptime = Stopwatch(port.clock)
        self.session = Session(port, self.uptime, settings.timeout_s)
        self.queue = Queue(port.storage, settings.queue_bytes)
        self._backoff = Backoff(port.board, settings.retry_first_ms, settings.retry_most_ms)
        self._most = settings.batch_reports
        self._is_failing = (
            False  # the last attempt to reach the service failed: the next one waits for _send_at
        )
        self._is_renewed = False
        self._attempts = 0  # to be given a run
        self._reports = 0  # of this boot
        self._run: Run | None = None
        self._begun_us = 0
        # Microseconds of uptime: the next run, the next message or claim, the end of the silence that was asked for.
        self._run_at = 0
        self._send_at = 0
        self._silent_until = 0

    def run(self) -> None:
        """Goes on for ever."""
        while True:
            self.step()

    def step(self) -> None:
        try:
            self._action()
        except PortError as error:
            self._later(str(error))
        if self.state != IDLE:
            self.port.board.collect()  # after each action, so that a small heap stays in one piece

    def due_ms(self) -> int:
        """How long nothing is to be done; a step within that time sleeps."""
        if self.state != IDLE:
            return 0
        due = self._send_at
        if self.session.identity is not None:
            due = min(due, self._run_at)
        return max(0, (max(due, self._silent_until) - self.uptime.us() + 999) // 1000)

    def note(self, text: str) -> None:
        """A line for the console."""
        print(f"{self.state}: {text}")

    def _action(self) -> None:
        if self.state == BOOT:
            self._boot()
        elif self.state == CLAIM:
            self._claim()
        elif self.state == START:
            self._start()
        elif self.state == MEASURE:
            self._measure()
        elif self.state == REPORT:
            self._report()
        elif self.state == SEND:
            self._send()
        elif self.state == ROTATE:
            self._rotate()
        else:
            self._idle()

    def _boot(self) -> None:
        self.session.identity = identity = load_identity(self.port.storage)
        self._reach_network()
        public = public_id(self.settings.invite)
        self.state = START if identity is not None and public in ("", identity.invite) else CLAIM

    def _reach_network(self) -> bool:
        """Joins the network, and asks for the time where that is not known."""
        if not self.port.network.connect():
            return False
        if self.session.clock.unix_us() == 0:
            self.port.clock.synchronise()
        return True

    def _claim(self) -> None:
        if not self._reach_network():
            self._later("no network")
            return
        outcome = claim(self.port, self.session, self.settings.invite, self.settings.name)
        if outcome.state == DONE:
            self._succeed()
            self.note(f"enrolled as {outcome.reason}")
        elif outcome.state != REFUSED or self.session.identity is None:
            self._later(outcome.reason, outcome.retry_after_s)
            return
        else:
            self.note(f"the new invite was refused, the old key stays: {outcome.reason}")
        self.state = START

    def _start(self) -> None:
        """Asks the service for a run, so that it has seen the start."""
        begun_us = self.uptime.us()
        answer = self._ask_for_run()
        run_id = answer.name("run_id") if answer.status == 201 else None
        if run_id is None:
            self._attempts += 0 if answer.retry_after_s else 1
            if self._attempts < self.settings.start_attempts:
                self._later(answer.reason, answer.retry_after_s)
                self._run_at = self._send_at
                return
            self.note(f"measuring without a run: {answer.reason}")
        else:
            self._succeed()
        self._attempts = 0
        self._run_at = begun_us + self.settings.period_s * 1000000
        self._reports += 1
        self._run = Run(self.session.boot_id, self._reports, run_id, self.session.clock.unix_us())
        self._begun_us = self.uptime.us()
        self.state = MEASURE

    def _ask_for_run(self) -> Answer:
        if not self._reach_network():
            return Answer(0, {}, b"", "no network")
        writer = Writer(128)
        writer.begin("{")
        writer.field("schema", 1)
        writer.field("model_sha256", self.port.runner.model_sha256)
        writer.end("}")
        return self.session.post("/runs", writer.done())

    def _measure(self) -> None:
        run, port, settings = self._run, self.port, self.settings
        if run is None:
            self.state = IDLE
            return
        try:
            run.measurement = measure(port, settings.window_s, settings.windows, settings.warmup, self.uptime)
            run.golden = run_golden(port.runner, port.storage, settings.golden, run.run_id)
        except (PortError, OSError, MemoryError) as error:
            run.error = f"{type(error).__name__}: {error}"
            self.note(run.error)
        else:
            found = run.measurement.latency.summary()
            self.note(f"{found['count']} inferences, p50 {found['p50']} us")
        run.ticks_us = self.uptime.us() - self._begun_us
        self.state = REPORT

    def _report(self) -> None:
        run = self._run
        if run is not None:
            ended_us = self._begun_us + run.ticks_us
            report = build(self.port, run)
            if not self.queue.append(message.record(run.boot_id, run.sequence, ended_us, report)):
                self.note("the storage has no room for the report")
        self._run = None
        waits = self._is_failing and self.uptime.us() < max(self._send_at, self._silent_until)
        self.state = IDLE if waits else SEND

    def _send(self) -> None:
        if not self._reach_network():
            self._later("no network")
            return
        items = [message.Item(each) for each in self.queue.batch(self._most, self.settings.batch_bytes)]
        lost = self.queue.dropped + self.queue.rejected
        state = message.State(self.port.network.rssi(), self.queue.depth, lost, self.uptime.us())
        body = message.compose(self.port.board, state, self.session.boot_id, items)
        answer = self.session.post("/measurements", body)
        outcome = message.outcome(answer, items)
        if outcome == message.STORED:
            self._stored(answer, len(items))
        elif outcome == message.POISON:
            self._refuse(answer, len(items))
        elif outcome == message.CONFLICT and not self._is_renewed:
            self._is_renewed = True
            self.session.begin_boot()
        else:
            self._later(answer.reason, answer.retry_after_s)

    def _stored(self, answer: Answer, count: int) -> None:
        if count:
            self.queue.acknowledge(count, message.conflicts(answer))
            for entry in message.entries_of(answer):
                self._say_what_became_of(entry)
        self._succeed()
        self._most = self.settings.batch_reports
        must_rotate = answer.document.get("rotate") is True or enrolment.is_pending(self.port)
        self.state = ROTATE if must_rotate else self._after_sending()

    def _say_what_became_of(self, entry: "dict[str, object]") -> None:
        reasons = entry.get("reasons")
        against = ", ".join(reasons) if isinstance(reasons, list) else ""
        rank = f"not ranked: {against}" if against else "ranked"
        self.note(f"report {entry['sequence']} {entry.get('state')}, {rank}")

    def _refuse(self, answer: Answer, count: int) -> None:
        """Sends the reports of a refused message one by one; one that is refused alone is dropped and counted."""
        self.note(f"{count} refused: {answer.reason}")
        if count > 1:
            self._most = 1
            return
        self.queue.reject()
        self.state = self._after_sending()

    def _rotate(self) -> None:
        answer = enrolment.rotate(self.port, self.session)
        self.note(f"key {answer.name('key_id') or answer.reason}")
        self.state = self._after_sending()

    def _after_sending(self) -> str:
        return SEND if self.queue.depth else IDLE

    def _succeed(self) -> None:
        """The service answered: the next message is a heartbeat, if there is nothing else to send."""
        self._backoff.reset()
        self._is_failing = self._is_renewed = False
        self._send_at = self.uptime.us() + self.settings.heartbeat_s * 1000000

    def _later(self, reason: str, retry_after_s: int | None = None) -> None:
        """Tries again after a pause, which the service may have asked for."""
        self.note(reason)
        now = self.uptime.us()
        pause_us = self._backoff.next_ms() * 1000
        if retry_after_s:
            self._silent_until = now + retry_after_s * 1000000
            pause_us = max(pause_us, retry_after_s * 1000000)
        self._send_at = now + pause_us
        self._is_failing = True
        self.state = IDLE

    def _idle(self) -> None:
        wait_ms = self.due_ms()
        if wait_ms:
            self.port.clock.sleep_ms(min(wait_ms, _LONGEST_SLEEP_MS))
        elif self.session.identity is None:
            self.state = CLAIM
        else:
            self.state = START if self.uptime.us() >= self._run_at else SEND
