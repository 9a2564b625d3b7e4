"""Messages: reports of runs, queued as records, the device's state around them, and what the service's answer means.

A report's bytes stay the same until the service has stored it. A record of the queue is the boot id (8 bytes), the
report's sequence (4), the uptime at the end of its run (8), and the report's bytes, which go into every message as they
are.

JSON is written straight into one buffer. MicroPython's dicts have no order, and its json escapes other characters than
CPython's: what is digested and signed is written here, in ASCII, without blanks, keys in the order in which they are
called. Numbers are integers. The buffer is made once, because one that grows by a few bytes at a time leaves a small
heap in pieces.
"""

from esp32_agent import VERSION
from esp32_agent.core.measuring import Measurement
from esp32_agent.core.session import Answer
from esp32_agent.port.base import Board, Port

_GROWTH = 256


class Writer:
    def __init__(self, size: int) -> None:
        """`size` is about how many bytes will be written; more than that is no error."""
        self._buffer = bytearray(size)
        self._used = 0
        self._comma = False

    def done(self) -> bytes:
        """What was written."""
        return bytes(memoryview(self._buffer)[: self._used])

    def begin(self, bracket: str) -> None:
        """Opens `{` or `[`."""
        self._separate()
        self._put(bracket.encode())
        self._comma = False

    def end(self, bracket: str) -> None:
        """Closes with `}` or `]`."""
        self._put(bracket.encode())
        self._comma = True

    def key(self, name: str) -> None:
        self._separate()
        self._text(name)
        self._put(b":")
        self._comma = False

    def value(self, value: int | str | None) -> None:
        self._separate()
        if value is None:
            self._put(b"null")
        elif value is True or value is False:
            self._put(b"true" if value else b"false")
        elif isinstance(value, int):
            self._put(str(value).encode())
        else:
            self._text(value)
        self._comma = True

    def field(self, name: str, value: int | str | None) -> None:
        self.key(name)
        self.value(value)

    def raw(self, data: bytes | memoryview) -> None:
        """A value that is JSON already."""
        self._separate()
        self._put(data)
        self._comma = True

    def _separate(self) -> None:
        if self._comma:
            self._put(b",")

    def _text(self, text: str) -> None:
        self._put(b'"')
        self._put(text.encode() if _is_plain(text) else _escaped(text))
        self._put(b'"')

    def _put(self, data: bytes | memoryview) -> None:
        end = self._used + len(data)
        if end > len(self._buffer):
            self._buffer.extend(bytes(end - len(self._buffer) + _GROWTH))
        self._buffer[self._used : end] = data
        self._used = end


def _is_plain(text: str) -> bool:
    return all(0x20 <= ord(letter) < 0x7F and letter not in '"\\' for letter in text)


def _escaped(text: str) -> bytes:
    out = bytearray()
    for letter in text:
        code = ord(letter)
        if letter in '"\\':
            out.append(0x5C)
            out.append(code)
        elif 0x20 <= code < 0x7F:
            out.append(code)
        elif 0xD800 <= code < 0xE000:
            out.append(0x3F)  # half of a pair is no character
        elif code < 0x10000:
            out.extend(_unit(code))
        else:
            out.extend(_unit(0xD800 + ((code - 0x10000) >> 10)))
            out.extend(_unit(0xDC00 + ((code - 0x10000) & 0x3FF)))
    return bytes(out)


def _unit(code: int) -> bytes:
    return b"\\u" + f"{code:04x}".encode()


_LONGEST_ERROR = 200


class Run:
    """One run of this boot. `run_id` is None where the service did not see it start."""

    def __init__(self, boot_id: str, sequence: int, run_id: str | None, started_us: int) -> None:
        self.boot_id = boot_id
        self.sequence = sequence
        self.run_id = run_id
        self.started_us = started_us  # time of day; 0 while the clock is not set
        self.ticks_us = 0  # from the service's answer to the end
        self.measurement: Measurement | None = None
        self.golden: tuple[int, str] | None = None
        self.error: str | None = None


def build(port: Port, run: Run) -> bytes:
    """The report as JSON."""
    runner, board = port.runner, port.board
    measurement = run.measurement or Measurement(0)
    writer = Writer(1024 + 80 * len(measurement.windows))
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("boot_id", run.boot_id)
    writer.field("sequence", run.sequence)
    writer.field("run_id", run.run_id)
    writer.field("model_sha256", runner.model_sha256)
    writer.field("input_bytes", runner.input_bytes)
    writer.field("input_source", port.camera.name)
    writer.key("runner")
    writer.begin("{")
    writer.field("name", runner.name)
    writer.field("version", runner.version)
    writer.end("}")
    writer.field("board", board.name)
    writer.field("clock_hz", board.clock_hz)
    writer.field("firmware_sha256", board.firmware_sha256)
    _measured(writer, measurement, port.power.source)
    _golden(writer, run.golden)
    writer.field("arena_bytes", runner.arena_bytes)
    writer.field("heap_free", board.heap_free())
    writer.field("started_us", run.started_us)
    writer.field("ticks_us", run.ticks_us)
    writer.field("error", run.error if run.error is None else run.error[:_LONGEST_ERROR])
    writer.end("}")
    return writer.done()


def _measured(writer: Writer, measurement: Measurement, power_source: str) -> None:
    writer.field("warmup", measurement.warmup)
    writer.key("windows")
    writer.begin("[")
    for window in measurement.windows:
        writer.begin("{")
        writer.field("count", window.count)
        writer.field("total_us", window.total_us)
        writer.field("energy_uj", window.energy_uj)
        writer.end("}")
    writer.end("]")
    summary = measurement.latency.summary()
    writer.key("latency_us")
    writer.begin("{")
    for name in ("count", "min", "p50", "p90", "p99"):
        writer.field(name, summary[name])
    writer.end("}")
    writer.key("power")
    writer.begin("{")
    writer.field("source", power_source)
    writer.field("idle_uw", measurement.idle_uw)
    writer.end("}")


def _golden(writer: Writer, golden: tuple[int, str] | None) -> None:
    writer.key("golden")
    if golden is None:
        writer.value(None)
        return
    writer.begin("{")
    writer.field("count", golden[0])
    writer.field("digest", golden[1])
    writer.end("}")


STORED = "stored"
POISON = "poison"  # the message, or one of its reports, will never be taken
CONFLICT = "conflict"  # the sequence of this boot was refused
LATER = "later"

_ENVELOPE = 20


class Item:
    """A record taken apart."""

    def __init__(self, record: bytes) -> None:
        self.boot_id = record[:8].hex()
        self.sequence = int.from_bytes(record[8:12], "big")
        self.ended_us = int.from_bytes(record[12:_ENVELOPE], "big")
        self.report = memoryview(record)[_ENVELOPE:]  # not a copy


class State:
    """What a message says of the device."""

    def __init__(self, rssi: int | None, depth: int, dropped: int, uptime_us: int) -> None:
        self.rssi = rssi
        self.depth = depth
        self.dropped = dropped
        self.uptime_us = uptime_us


def record(boot_id: str, sequence: int, ended_us: int, report: bytes) -> bytes:
    return bytes.fromhex(boot_id) + sequence.to_bytes(4, "big") + ended_us.to_bytes(8, "big") + report


def compose(board: Board, state: State, boot_id: str, items: list[Item]) -> bytes:
    """The message's bytes. Without items it is a heartbeat."""
    writer = Writer(384 + sum(len(item.report) + 48 for item in items))
    writer.begin("{")
    writer.field("schema", 1)
    writer.key("device")
    writer.begin("{")
    writer.field("board", board.name)
    writer.field("reset_reason", board.reset_reason())
    writer.field("rssi", state.rssi)
    writer.field("heap_free", board.heap_free())
    writer.field("queue_depth", state.depth)
    writer.field("dropped", state.dropped)
    writer.field("agent_version", VERSION)
    writer.field("uptime_us", state.uptime_us)
    writer.end("}")
    writer.key("reports")
    writer.begin("[")
    for item in items:
        writer.begin("{")
        # The uptime of another boot says nothing about now.
        writer.field("waited_us", state.uptime_us - item.ended_us if item.boot_id == boot_id else None)
        writer.key("report")
        writer.raw(item.report)
        writer.end("}")
    writer.end("]")
    writer.end("}")
    return writer.done()


def outcome(answer: Answer, items: list[Item]) -> str:
    """STORED only where the answer names each report that was sent: a captive portal says 200 to everything."""
    if answer.status == 200 and _names_all(answer.document.get("reports"), items):
        return STORED
    if answer.status == 409:
        return CONFLICT
    is_refused = answer.status == 413 or (answer.status in (400, 422) and answer.document)
    if is_refused and items and not _blames_device(answer.document.get("errors")):
        return POISON
    return LATER


def entries_of(answer: Answer) -> "list[dict[str, object]]":
    """What became of each report."""
    entries = answer.document.get("reports")
    return entries if isinstance(entries, list) else []


def conflicts(answer: Answer) -> int:
    """How many reports were refused because another one has their identity."""
    return sum(1 for entry in entries_of(answer) if entry.get("state") == "conflict")


def _names_all(entries: object, items: list[Item]) -> bool:
    if not isinstance(entries, list) or len(entries) != len(items):
        return False
    for place, item in enumerate(items):
        entry = entries[place]
        if not isinstance(entry, dict):
            return False
        if entry.get("boot_id") != item.boot_id or entry.get("sequence") != item.sequence:
            return False
    return True


def _blames_device(errors: object) -> bool:
    """Whether the fault lies around the reports, so that dropping one would not mend it."""
    if not isinstance(errors, list):
        return False
    for entry in errors:
        field = entry.get("field") if isinstance(entry, dict) else None
        if isinstance(field, str) and field.startswith("device"):
            return True
    return False
