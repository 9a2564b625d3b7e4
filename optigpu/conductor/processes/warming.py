"""Watches what a process does until it is ready, and the machine while it warms up."""

from optigpu.child.messages import LOADING, WARMING_UP
from optigpu.conductor.processes.asking import Watch
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostReading, HostSample


class WarmUpWatch:
    """A Watch that passes everything on, and reads the counters when the process says that it warms up."""

    def __init__(self, progress: Watch, monitor: HostMonitor) -> None:
        self._progress, self._monitor = progress, monitor
        self._before: HostReading | None = None
        self._doing = LOADING

    def check(self) -> None:
        self._progress.check()

    def show(self, doing: str) -> None:
        """The last time that it says so counts: what compiles comes before."""
        self._progress.show(doing)
        self._doing = doing
        if doing == WARMING_UP:
            self._before = self._monitor.read()

    @property
    def is_loading(self) -> bool:
        """Whether the process has not gone on from reading its model."""
        return self._doing == LOADING

    def sample(self) -> HostSample | None:
        """What happened since then; None for a process that never said so. To be asked when it is ready."""
        return self._monitor.between(self._before, self._monitor.read()) if self._before else None
