"""Measures: warm-up, then windows, with statistics of many integer times in little memory; and runs the golden inputs.

Frames, garbage collection and the sensor stay outside of the timing. The digest of what the model made of the golden
inputs binds the outputs to one run, so that a device cannot send it without having run the model in that run, or having
its outputs. Their file: `OGLD`, then count, input bytes and output bytes as little-endian u32, then for each golden
vector its input and its expected output. The expected outputs are not read here: the service compares.
"""

import hashlib
from array import array

from esp32_agent.core.timing import Stopwatch
from esp32_agent.port.base import Port, PortError, Runner, Storage

FEWEST = ((50, 11), (90, 64), (99, 662))
"""Percentiles, and the least number of inferences with which each is reported: the engine's own rule."""

_STEPS = 64  # buckets for each doubling
_BUCKETS = 20 * _STEPS + _STEPS  # up to 2**26 us, 67 s; what is longer falls into the last one


class Histogram:
    """Counts of microseconds in buckets whose width is at most 1/64 of their value.

    Minimum, maximum, count and total are exact. A percentile is the middle of its bucket, at most 0.8% from the time
    that has that rank. Each doubling in which a time fell takes 256 bytes, and all of them 5.4 KB.
    """

    def __init__(self) -> None:
        self._doublings: list[array[int] | None] = [None] * (_BUCKETS // _STEPS)
        self.count = 0
        self.total_us = 0
        self.min_us = 0
        self.max_us = 0

    def add(self, us: int) -> None:
        if self.count == 0 or us < self.min_us:
            self.min_us = us
        if us > self.max_us:
            self.max_us = us
        self.count += 1
        self.total_us += us
        bucket = _bucket(us)
        counts = self._doublings[bucket // _STEPS]
        if counts is None:
            counts = self._doublings[bucket // _STEPS] = array("I", bytearray(4 * _STEPS))
        counts[bucket % _STEPS] += 1

    def percentile(self, num: int, den: int) -> int:
        """The time of rank ceil(count * num / den), where at least one was added: percentile(9, 10) is p90."""
        rank = max(1, (self.count * num + den - 1) // den)
        seen = 0
        for place, counts in enumerate(self._doublings):
            for step, count in enumerate(counts or ()):
                seen += count
                if seen >= rank:
                    return self._value(place * _STEPS + step)
        return self.max_us

    def _value(self, bucket: int) -> int:
        if bucket == _BUCKETS - 1:
            return self.max_us
        return max(self.min_us, min(self.max_us, _middle(bucket)))

    def summary(self) -> "dict[str, int | None]":
        """count, min, p50, p90 and p99; None for a percentile that so few times do not bound."""
        found: dict[str, int | None] = {"count": self.count, "min": self.min_us if self.count else None}
        for percent, fewest in FEWEST:
            found[f"p{percent}"] = self.percentile(percent, 100) if self.count >= fewest else None
        return found


def _bucket(us: int) -> int:
    """Times below 128 have a bucket each, and from there on every doubling has 64."""
    shift = 0
    while us >= 2 * _STEPS:
        us >>= 1
        shift += 1
    return min(shift * _STEPS + us, _BUCKETS - 1)


def _middle(bucket: int) -> int:
    shift = max(0, bucket // _STEPS - 1)
    return ((bucket - shift * _STEPS) << shift) + ((1 << shift) >> 1)


_COLLECT_EVERY = 64  # inferences, so that the collector never has to run inside of one
_MOST = 1000000  # inferences of a window: a clock that stands still ends it too
_IDLE_READS = 10
_IDLE_PAUSE_MS = 100


class Window:
    """Inferences, the sum of their times, and the energy over the whole window (None without a sensor)."""

    def __init__(self, count: int, total_us: int, energy_uj: int | None) -> None:
        self.count = count
        self.total_us = total_us
        self.energy_uj = energy_uj


class Measurement:
    """What a run measured."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.windows: list[Window] = []
        self.latency = Histogram()
        self.idle_uw: int | None = None


def measure(
    port: Port, seconds: int, windows: int, warmup: int, uptime: Stopwatch | None = None
) -> Measurement:
    """`windows` windows, each at least one inference and at least `seconds` of inference time.

    A frame is taken before each window and serves all of its inferences. `uptime` is read after each inference, so
    that it survives windows that are longer than the ticks' period. Raises PortError.
    """
    watch = uptime or Stopwatch(port.clock)
    found = Measurement(warmup)
    found.idle_uw = _idle_uw(port)
    frame = port.camera.frame()
    for _ in range(warmup):
        port.runner.set_input(frame)
        port.runner.invoke()
        watch.us()
    for _ in range(windows):
        frame = port.camera.frame()
        port.board.collect()
        found.windows.append(_window(port, frame, seconds * 1000000, found.latency, watch))
    return found


def _window(port: Port, frame: bytes, least_us: int, latency: Histogram, watch: Stopwatch) -> Window:
    ticks, diff = port.clock.ticks_us, port.clock.ticks_diff
    runner, power = port.runner, port.power
    count = total_us = 0
    power.start()
    while count == 0 or (total_us < least_us and count < _MOST):
        runner.set_input(frame)  # the model may have used the tensor's memory for something else
        begin = ticks()
        measured = runner.invoke()
        lap = diff(ticks(), begin)
        if measured is not None:
            lap = measured
        if lap < 0:
            raise PortError("The clock went backwards during an inference.")
        latency.add(lap)
        total_us += lap
        count += 1
        power.poll()
        watch.us()
        if count % _COLLECT_EVERY == 0:
            port.board.collect()
    energy_uj, _ = power.stop()
    return Window(count, total_us, energy_uj)


def _idle_uw(port: Port) -> int | None:
    """The mean power over a second without inference."""
    total = 0
    for _ in range(_IDLE_READS):
        power = port.power.read_uw()
        if power is None:
            return None
        total += power
        port.clock.sleep_ms(_IDLE_PAUSE_MS)
    return total // _IDLE_READS


_MAGIC = b"OGLD"
_HEADER = 16
_MOST_GOLDEN = 1024  # golden vectors


def run_golden(runner: Runner, storage: Storage, name: str, run_id: str | None) -> tuple[int, str] | None:
    """How many golden inputs ran, and SHA-256 over the run's id and all outputs; None where no such file is.

    Raises PortError for a file that is damaged or belongs to another model.
    """
    header = storage.read(name, 0, _HEADER)
    if header is None:
        return None
    if len(header) < _HEADER or header[:4] != _MAGIC:
        raise PortError(f"{name} holds no golden inputs.")
    count, inputs, outputs = _u32(header, 4), _u32(header, 8), _u32(header, 12)
    if inputs != runner.input_bytes or outputs != runner.output_bytes or not 0 < count <= _MOST_GOLDEN:
        raise PortError(f"{name} holds golden inputs of another model.")
    digest = hashlib.sha256((run_id or "").encode())
    for place in range(count):
        data = storage.read(name, _HEADER + place * (inputs + outputs), inputs)
        if data is None or len(data) < inputs:
            raise PortError(f"{name} ends within golden input {place + 1}.")
        runner.set_input(data)
        runner.invoke()
        digest.update(runner.output())
    return count, digest.digest().hex()


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
