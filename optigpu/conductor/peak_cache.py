"""The machine's peak rates, measured in a separate process and cached for a day.

They are measured while the conductor holds the device's lock and before any variant's process runs; and once more at a
job's end where a variant was faster than they allow. The file keeps the best of each rate.
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from optigpu.child.messages import RunPeaks
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.progress import JobProgress
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.job.spec import digest
from optigpu.paths import cache_dir
from optigpu.vocabulary import (
    CancelledError,
    DeadlineError,
    DeviceKind,
    ReplicateError,
    UnsupportedError,
    utc_now,
)

PEAKS = (sys.executable, "-P", "-m", "optigpu.child.peaks")
"""The program that measures peaks. -P keeps files of the working directory from being taken for modules."""
KEPT_FOR = timedelta(days=1)
PEAKS_METHOD = 2
"""Part of a cached file's name. Increase it when the way of measuring peaks changes."""

_log = logging.getLogger(__name__)


class MachinePeaks:
    """The peak rates of `device` with that many threads: those of the last day, else measured at the first `known`.

    `keep` are descriptors that the measuring process inherits.
    """

    def __init__(
        self,
        environment: Environment,
        device: DeviceKind,
        threads: int,
        progress: JobProgress,
        *,
        keep: Sequence[int] = (),
        program: Sequence[str] = PEAKS,
    ) -> None:
        self._order = RunPeaks(device=device, threads=threads)
        self._progress = progress
        self._keep, self._program = keep, program
        self._path = _path(environment, device, threads)
        self._again = False

    @cached_property
    def known(self) -> Peaks | None:
        """None if they cannot be measured; the log says why. Raises what `progress.check` raises."""
        return _read(self._path) or self._stored(self._measured("measuring the peak rates of this machine"))

    def better(self) -> Peaks | None:
        """The better of each rate that is known and of a second measurement; None if that was made before or fails.

        It also fails when the job is cancelled or its time is up, since what is measured is worth keeping.
        """
        if self._again or self.known is None:
            return None
        self._again = True
        try:
            found = self._measured("measuring the peak rates again: a variant was faster than they allow")
        except (CancelledError, DeadlineError):
            return None
        if found is None:
            return None
        self.known = self._stored(self.known.with_better(found))
        return self.known

    def _measured(self, doing: str) -> Peaks | None:
        self._progress.show(doing)
        try:
            with Child(self._program, child_variables(self._order.threads), keep=self._keep) as child:
                return ask(child, self._order, Peaks, self._progress)
        except (ReplicateError, UnsupportedError) as error:
            _log.warning("the machine's peak rates could not be measured: %s", error)
            return None

    def _stored(self, peaks: Peaks | None) -> Peaks | None:
        if peaks is not None:
            _write(self._path, peaks)
        return peaks


def _path(environment: Environment, device: DeviceKind, threads: int) -> Path:
    """One file for each of what a peak depends on."""
    key = digest(
        {
            "method": PEAKS_METHOD,
            "hardware_class": environment.hardware_class,
            "host_id": environment.host_id,
            "device": device,
            "threads": threads,
            "torch": environment.software.get("torch"),
        }
    )
    return cache_dir() / "peaks" / f"{key}.json"


def _read(path: Path) -> Peaks | None:
    """The peaks in the file, if it is complete and of the last day."""
    try:
        peaks = Peaks.model_validate_json(path.read_text())
    except (OSError, UnicodeDecodeError, ValidationError):
        return None
    return peaks if timedelta(0) <= utc_now() - peaks.measured_at < KEPT_FOR else None


def _write(path: Path, peaks: Peaks) -> None:
    """Writes the file completely or not at all. If the folder cannot be written, the next job measures again."""
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(peaks.model_dump_json())
        draft.replace(path)
