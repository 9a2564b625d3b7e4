"""The meters of one replicate, and what other processes did while a meter was read that times requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.child.messages import Metered, RunMeter
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.conductor.verdicts.marks import Yardstick
from optigpu.meters import METERS
from optigpu.vocabulary import METRICS, DeviceKind, ReplicateError

TRIES = 2
"""A meter that times requests is read so often where each reading is disturbed; the least disturbed one counts."""


@dataclass(frozen=True)
class MeterReading:
    """What a meter read."""

    metered: Metered
    # What other processes did meanwhile; None for a meter that times no requests.
    during: HostSample | None = None


@dataclass(frozen=True)
class Metering:
    """Reads meters of a ready process."""

    child: Child
    device: DeviceKind
    monitor: HostMonitor
    progress: JobProgress

    def read(self, meters: Sequence[str]) -> tuple[MeterReading, ...]:
        found = []
        for meter in meters:
            self.progress.show(f"reading the {meter} meter")
            with self.progress.advance(meter):
                timed = METERS[meter].timed
                found.append(self._timed(meter) if timed else MeterReading(self._ask(meter)))
        return tuple(found)

    def _timed(self, meter: str) -> MeterReading:
        found: dict[float, MeterReading] = {}
        for _ in range(TRIES):
            before = self.monitor.read()
            metered = self._ask(meter)
            during = self.monitor.between(before, self.monitor.read())
            yardstick = Yardstick(self.device, self.monitor.fastest_probe_s)
            found.setdefault(yardstick.lost_share(during), MeterReading(metered, during))
            if not yardstick.marks(during) or during.wall_s > self.progress.time_left_s:
                break
        return found[min(found)]

    def _ask(self, meter: str) -> Metered:
        metered = ask(self.child, RunMeter(meter=meter), Metered, self.progress)
        unknown = sorted({*metered.values, *metered.reasons} - set(METRICS))
        if unknown:
            raise ReplicateError(f"The meter {metered.meter} gave unknown metrics: {', '.join(unknown)}.")
        return metered
