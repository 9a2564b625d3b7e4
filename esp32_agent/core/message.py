"""Messages: queued records, the device's state around them, and what the service's answer means for the queue.

A record of the queue is the boot id (8 bytes), the report's sequence (4), the uptime at the end of its run (8), and the
report's bytes, which go into every message as they are.
"""

from esp32_agent import VERSION
from esp32_agent.core.encode import Writer
from esp32_agent.core.session import Answer
from esp32_agent.port.base import Board

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
