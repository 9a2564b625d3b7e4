"""A wall meter: joules that somebody's own program counts, from a file or by HTTP. docs/measure.md is its interface.

OPTIGPU_WALL_METER names the file, or the address with http:// or https://. A file holds a reading in each line, the
newest last; an address answers with the newest one. A reading is JSON, {"time": 1760000000.5, "joules": 1234.5}, or in
a file also CSV, "1760000000.5,1234.5". `time` is when it was taken, in seconds since 1970 or as ISO 8601 with a zone.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import AwareDatetime, BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from optigpu.hardware.energy import Change, Energy, EnergySensor
from optigpu.hardware.sensors import SensorError
from optigpu.paths import expanded, without_home
from optigpu.vocabulary import UnsupportedError

WALL_METER = "OPTIGPU_WALL_METER"
"""The environment variable that names the meter."""
MOST_W = 100e3
"""More than any machine draws at one plug."""
SLACK_S = 1.0
"""A reading may be dated, or a step may come, by so much too early or too late."""
STALE_S = 30.0
"""A meter whose newest reading is older has stopped, or its clock is wrong."""
TIMEOUT_S = 2.0
MOST_BYTES = 4096
"""Of a reading, and of a file's end."""
EXAMPLE = '{"time": 1760000000.5, "joules": 1234.5}'


class WallReading(BaseModel):
    """What a meter gives; further fields are its own affair."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    time: AwareDatetime
    joules: NonNegativeFloat


class WallFile:
    """A file to which somebody's program appends lines."""

    period_s = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"the wall meter {without_home(str(path))}"

    def newest(self) -> WallReading:
        """The last line that is complete."""
        try:
            if not self._path.is_file():
                raise SensorError(
                    f"There is no file of {self.name}; start what writes it, or unset {WALL_METER}."
                )
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
                lines = file.read(MOST_BYTES).decode(errors="replace").rpartition("\n")[0].splitlines()
        except OSError as error:
            raise SensorError(f"The file of {self.name} cannot be read ({error.strerror}).") from error
        line = next((line.strip() for line in reversed(lines) if line.strip()), None)
        if line is None or line.replace(" ", "").lower().startswith("time,joules"):
            raise SensorError(f"{_begin(self.name)} has no reading yet; wait until it has one.")
        return _parsed(self.name, line, is_json=line.startswith("{"))


class WallAddress:
    """An address that answers with the newest reading."""

    period_s = 0.25

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        user, _, host = parts.netloc.rpartition("@")
        # Neither a password nor a key of the address goes into results.
        self.name = f"the wall meter {parts.scheme}://{host}{parts.path}"
        self._request = urllib.request.Request(parts._replace(netloc=host).geturl())
        if user:
            self._request.add_header("Authorization", f"Basic {b64encode(unquote(user).encode()).decode()}")
        # Without a proxy: the meter is nearby.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def newest(self) -> WallReading:
        """What it answers."""
        try:
            with self._opener.open(self._request, timeout=TIMEOUT_S) as answer:
                text = answer.read(MOST_BYTES).decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise SensorError(f"{_begin(self.name)} does not answer ({reason}); check it.") from error
        return _parsed(self.name, text)


WallSource = WallFile | WallAddress


def wall_source() -> WallSource | None:
    """The meter that the environment names; None if it names none. Raises SensorError for a file of no home folder."""
    named = os.environ.get(WALL_METER)
    if not named:
        return None
    if named.startswith(("http://", "https://")):
        return WallAddress(named)
    try:
        return WallFile(expanded(named, WALL_METER))
    except UnsupportedError as error:
        raise SensorError(str(error)) from None


class WallSensor:
    """A wall meter as an energy sensor. Its changes are dated by the meter's own time.

    Raises SensorError if there is no reading, or only an old one.
    """

    scope = "all that the meter feeds: usually the whole machine with its power supply"
    resolution_j: float | None = None
    least_hz = 0.0

    def __init__(self, source: WallSource) -> None:
        self.source = source.name.removeprefix("the ")
        self.period_s = source.period_s
        self.changes: list[Change] = []
        self.looks = 0
        self._meter = source
        self._last = source.newest()
        self._rose = self._last
        self._longest_gap_s = 0.0
        self._check_clock(self._last)
        age_s = self._age_s()
        if age_s > STALE_S:
            raise SensorError(
                f"The newest reading of {source.name} is {age_s:.0f} s old: it has stopped, or its clock is behind "
                "this machine's. Start it, or set its clock."
            )

    def from_now_s(self) -> float:
        """Later, by what the clocks may differ: a reading may be dated ahead."""
        return time.time() + SLACK_S

    def look(self) -> None:
        """Reads the meter. Raises SensorError if it fails, or if its readings cannot be true."""
        reading, last = self._meter.newest(), self._last
        self.looks += 1
        self._check_clock(reading)
        if reading.time < last.time:
            raise SensorError(
                f"The time of {self._meter.name} went back from {last.time.isoformat()} to "
                f"{reading.time.isoformat()}; check what writes its readings."
            )
        if reading.joules < last.joules:
            raise SensorError(
                f"The joules of {self._meter.name} fell from {last.joules:.1f} to {reading.joules:.1f}; it was reset "
                "or does not count up. Measure again."
            )
        self._longest_gap_s = max(self._longest_gap_s, (reading.time - last.time).total_seconds())
        self._last = reading
        if reading.joules > last.joules and reading.time > last.time:
            # Steps may be coarse, so that the time since the last one counts.
            seconds = (reading.time - self._rose.time).total_seconds()
            joules = reading.joules - self._rose.joules
            if joules > MOST_W * (seconds + SLACK_S):
                raise SensorError(
                    f"{_begin(self._meter.name)} rose by {joules:.0f} J in {seconds:.2f} s, which is more than "
                    f"{MOST_W / 1e3:.0f} kW; check that it counts joules."
                )
            self._rose = reading
            self.changes.append(Change(reading.time.timestamp(), reading.joules))

    def stopped(self) -> str | None:
        """It has, if its newest reading is far older than any was before."""
        age_s = self._age_s()
        if age_s <= 3 * self._longest_gap_s + SLACK_S:
            return None
        return f"{_begin(self._meter.name)} gave no new reading for {age_s:.1f} s: it has stopped. Start it again."

    def why_few(self, changes: int, seconds: float) -> str:
        return (
            f"{_begin(self._meter.name)} counted up {changes} times in {seconds:.1f} s, too seldom for a figure; use "
            "one that is read more often or counts in smaller steps."
        )

    def _age_s(self) -> float:
        return time.time() - self._last.time.timestamp()

    def _check_clock(self, reading: WallReading) -> None:
        ahead_s = reading.time.timestamp() - time.time()
        if ahead_s > SLACK_S:
            raise SensorError(
                f"The clock of {self._meter.name} is {ahead_s:.0f} s ahead of this machine's, so its readings cannot "
                "be matched with what ran. Set both clocks."
            )


CountingSensor = EnergySensor | WallSensor
"""What counts joules in steps, from which only whole steps are taken."""


def between_changes(sensor: CountingSensor, from_s: float) -> Energy:
    """The energy from the first change since `from_s` to the last one: whole steps of the counter. `looks` is 0."""
    changes = [change for change in sensor.changes if change.at_s >= from_s]
    if not changes:
        return Energy(0.0, 0.0, 0, 0)
    first, last = changes[0], changes[-1]
    return Energy(last.joules - first.joules, last.at_s - first.at_s, 0, len(changes))


def _parsed(name: str, text: str, is_json: bool = True) -> WallReading:
    try:
        if is_json:
            return WallReading.model_validate_json(text)
        return WallReading.model_validate(dict(zip(("time", "joules"), text.split(","), strict=False)))
    except ValidationError:
        raise SensorError(
            f"{_begin(name)} gave {text.strip()[:60]!r}, which is not a reading such as {EXAMPLE}; see docs/measure.md."
        ) from None


def _begin(name: str) -> str:
    return name[0].upper() + name[1:]
