"""A meter that times requests is read again where something disturbs it; the others are read once."""

from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from optigpu.conductor.processes.metering import TRIES, Metering, MeterReading
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.vocabulary import DeviceKind
from tests.engine.measuring import Standing, standing_ready
from tests.engine.processes import program

QUIET = HostSample(wall_s=1.0, cpus=2, foreign_s=0.0)
BUSY = HostSample(wall_s=1.0, cpus=2, foreign_s=0.5)
BUSIER = HostSample(wall_s=1.0, cpus=2, foreign_s=0.6)


class Told:
    """A monitor that says of each reading what it was told to say."""

    fastest_probe_s = None

    def __init__(self, samples: Sequence[HostSample]) -> None:
        self.left = list(samples)

    def read(self) -> None:
        """A moment is as good as another."""

    def between(self, before: None, after: None) -> HostSample:
        return self.left.pop(0)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing_ready(tmp_path_factory.mktemp("metering"), program("well_behaved")) as standing:
        yield standing


def read(standing: Standing, meter: str, *samples: HostSample) -> tuple[MeterReading, int]:
    """The reading, and how many of the samples were used."""
    told = Told(samples)
    metering = Metering(standing.child, DeviceKind.CPU, cast("HostMonitor", told), standing.progress)
    (reading,) = metering.read([meter])
    return reading, len(samples) - len(told.left)


def test_a_quiet_reading_is_the_only_one(ready: Standing) -> None:
    reading, readings = read(ready, "highest_rate", QUIET, BUSY)
    assert (reading.during, readings) == (QUIET, 1)
    assert reading.metered.meter == "highest_rate"


def test_a_disturbed_one_is_read_again(ready: Standing) -> None:
    reading, readings = read(ready, "highest_rate", BUSY, QUIET, QUIET)
    assert (reading.during, readings) == (QUIET, 2)


@pytest.mark.parametrize("samples", [(BUSY, BUSIER, QUIET), (BUSIER, BUSY, QUIET)])
def test_of_disturbed_ones_the_least_disturbed_counts(
    ready: Standing, samples: tuple[HostSample, ...]
) -> None:
    reading, readings = read(ready, "highest_rate", *samples)
    assert (reading.during, readings) == (BUSY, TRIES)


def test_it_is_not_read_again_where_the_job_has_no_time_for_it(
    ready: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready.progress, "_deadline", 0.0)
    monkeypatch.setattr(ready.progress, "check", lambda: None)
    reading, readings = read(ready, "highest_rate", BUSY, QUIET)
    assert (reading.during, readings) == (BUSY, 1)


def test_a_meter_that_times_nothing_is_read_once_and_not_watched(ready: Standing) -> None:
    reading, readings = read(ready, "memory", BUSY)
    assert (reading.during, readings) == (None, 0)
