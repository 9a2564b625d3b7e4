"""What the processes of a fleet say, and the account at the end."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from optigpu.vocabulary import Frozen


class FleetProgress(Frozen):
    """The sums of one process so far."""

    kind: Literal["progress"]
    enrolled: int
    made: int
    acknowledged: int


class MadeReport(Frozen):
    """A report that a device made. `fate`: kept in its queue, cut off by a power cut while it was stored, or dropped.

    `waits`: it was in the queue at the end. `digest` is that of its content, if the service has answered to it.
    """

    boot_id: str
    sequence: int
    fate: Literal["kept", "cut", "dropped"]
    acknowledged: bool
    waits: bool
    digest: str | None


class DeviceAccount(Frozen):
    """What one device did and knows."""

    kind: Literal["account"]
    device_id: str | None
    boots: int
    reports: tuple[MadeReport, ...]
    quarantined: dict[str, int]
    conflicts: int
    statuses: dict[str, int]
    faults: dict[str, int]
    latencies_us: tuple[int, ...]


FLEET_LINE: TypeAdapter[FleetProgress | DeviceAccount] = TypeAdapter(
    Annotated[FleetProgress | DeviceAccount, Field(discriminator="kind")]
)


class SimulatedModel(Frozen):
    """What a manifest of the simulated model needs to say."""

    sha256: str
    board: str
    input_bytes: int
    output_bytes: int
    golden_inputs: tuple[str, ...]
    golden_outputs: tuple[str, ...]


class StoredReport(Frozen):
    """A report as the service has it."""

    boot_id: str
    sequence: int
    digest: str
    source: str
    ranked: bool


class RequestTimes(Frozen):
    """Of the requests that were answered; null where there were none."""

    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


class FleetResult(Frozen):
    """The fleet's account against the service's.

    `lost` reports were kept by a device, wait in no queue, and the service has not got them. `unstored` were
    acknowledged, and the service has not got them. `duplicated` are there more than once, `altered` with another
    content, `foreign` are the service's alone. `cut` and `dropped` were never in a queue: power cuts, full media.
    """

    devices: int
    enrolled: int
    seconds: float
    made: int
    acknowledged: int
    stored: int
    waiting: int
    cut: int
    dropped: int
    lost: int
    unstored: int
    duplicated: int
    altered: int
    foreign: int
    conflicts: int
    ranked: int
    boots: int
    faults: dict[str, int]
    statuses: dict[str, int]
    quarantined: dict[str, int]
    requests: RequestTimes

    @property
    def is_right(self) -> bool:
        """Whether every device is there and no report was lost, doubled, altered or ranked."""
        wrong = (
            self.lost,
            self.unstored,
            self.duplicated,
            self.altered,
            self.foreign,
            self.conflicts,
            self.ranked,
        )
        return not any(wrong) and self.enrolled == self.devices
