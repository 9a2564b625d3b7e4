"""What devices send, and what they are answered. Their reports, which are stored, are in `documents/devices.py`."""

from typing import Annotated

from pydantic import Field, StringConstraints

from optigpu.documents.devices import (
    Amount,
    BoardName,
    DeviceReport,
    DeviceStatus,
    Hex64,
    Name,
    ReportAnswer,
    Sent,
)
from optigpu.vocabulary import Frozen

MOST_REPORTS = 32
"""In one message."""
Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class SentReport(Frozen):
    """A report in a message. `waited_us` is the device's time from the run's end to the message; null after a
    reboot."""

    waited_us: Amount | None
    report: DeviceReport


class DeviceMessage(Sent):
    """What a device sends: how it is, and reports from its queue. No report at all is a heartbeat."""

    device: DeviceStatus
    reports: Annotated[tuple[SentReport, ...], Field(max_length=MOST_REPORTS)]


class MessageAnswer(Frozen):
    """The answer to a message, report by report in its order. `rotate` asks the device to make a new key."""

    server_time_us: int
    rotate: bool
    reports: tuple[ReportAnswer, ...]


class ClaimRequest(Sent):
    """A device asks to be enrolled: `invite` is the first group of its code; the others seal its key and sign this."""

    invite: Annotated[str, StringConstraints(pattern=r"^[0-9A-HJKMNP-TV-Z]{4}$")]
    nonce: Hex32
    sealed_key: Hex64
    proof: Hex64
    board: BoardName
    firmware: Hex64
    name: Name | None = None


class ClaimAnswer(Frozen):
    """The identity of a new device; it signs with `key_id` from now on."""

    device_id: str
    key_id: str
    server_time_us: int


class RunRequest(Sent):
    """A device is about to measure this model."""

    model_sha256: Hex64


class RunAnswer(Frozen):
    """The server saw the start; the run's report names `run_id`."""

    run_id: str
    server_time_us: int


class KeyRequest(Sent):
    """A new key, sealed with the one that signs this request."""

    nonce: Hex32
    sealed_key: Hex64


class KeyAnswer(Frozen):
    """The new key's id. The old key is valid until the new one is first used."""

    key_id: str
