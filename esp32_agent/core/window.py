"""Measures: warm-up, then windows. Frames, garbage collection and the sensor stay outside of the timing."""

from esp32_agent.core.stats import Histogram
from esp32_agent.core.ticks import Stopwatch
from esp32_agent.port.base import Port, PortError

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
