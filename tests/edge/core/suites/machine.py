"""A port without a machine: a clock that is set by hand, storage in memory that can lose its power or be full.

And assertions that say what differs, on interpreters without pytest.
"""

import gc

from esp32_agent.core import timing
from esp32_agent.port import base

HOUR_US = 3600 * 1000000
EPOCH_US = 1790000000 * 1000000  # the true time when the clock's `now` is 0: September 2026


class PowerCut(BaseException):
    """The board lost its power; nothing in the agent may catch it."""


class Clock(base.Clock):
    """Ticks that wrap at 2**30, near the wrap to begin with."""

    def __init__(self, start=timing.PERIOD - 3000000, is_set=True):
        self.now = start
        self.is_set = is_set
        self.error_us = 0
        self.has_server = False  # a time server that answers
        self.slept_ms = 0

    def ticks_us(self):
        return self.now % timing.PERIOD

    def ticks_diff(self, later, earlier):
        return timing.diff(later, earlier)

    def sleep_ms(self, ms):
        self.slept_ms += ms
        self.now += ms * 1000

    def true_us(self):
        return EPOCH_US + self.now

    def unix_us(self):
        return self.true_us() + self.error_us if self.is_set else 0

    def synchronise(self):
        if self.has_server:
            self.is_set, self.error_us = True, 0
        return self.is_set


class Network(base.Network):
    def __init__(self):
        self.is_up = True

    def connect(self):
        return self.is_up

    def rssi(self):
        return -61 if self.is_up else None


class Storage(base.Storage):
    """Files in memory. After `budget` more bytes the power is cut; above `capacity` bytes the medium is full."""

    def __init__(self):
        self.files = {}
        self.budget = None
        self.capacity = None
        self.tears = False  # a replace that the power cut meets leaves a torn file, as a poor medium may
        self.written = 0

    def read(self, name, offset=0, size=-1):
        data = self.files.get(name)
        if data is None:
            return None
        return bytes(data[offset:] if size < 0 else data[offset : offset + size])

    def append(self, name, data):
        count = self._allowed(len(data), 0)
        file = self.files.get(name)
        if file is None:
            file = self.files[name] = bytearray()
        file += data[:count]
        self._end(count, len(data))

    def replace(self, name, data):
        count = self._allowed(len(data), len(self.files.get(name, b"")) if self.tears else 0)
        if count == len(data) or (self.tears and self.budget == 0):
            self.files[name] = bytearray(data[:count])
        self._end(count, len(data))

    def truncate(self, name, size):
        self._step()
        assert size <= len(self.files[name])
        self.files[name] = self.files[name][:size]

    def size(self, name):
        return len(self.files.get(name, b""))

    def remove(self, name):
        if name in self.files:
            self._step()
            del self.files[name]

    def used(self):
        return sum(len(data) for data in self.files.values())

    def _step(self):
        """A change of the folder counts as a byte."""
        if self.budget == 0:
            raise PowerCut()
        self._spend(1)

    def _allowed(self, count, given_back):
        if self.budget is not None and count > self.budget:
            count = self.budget
        if self.capacity is not None:
            count = min(count, max(0, self.capacity - self.used() + given_back))
        return count

    def _end(self, count, wanted):
        self._spend(count)
        if count < wanted:
            if self.budget == 0:
                raise PowerCut()
            raise base.StorageFullError("No room is left on the device.")

    def _spend(self, count):
        self.written += count
        if self.budget is not None:
            self.budget -= count


class Power(base.Power):
    source = "simulated"

    def __init__(self):
        self.uw = 500000
        self.polls = 0
        self.energy_uj = 7000

    def read_uw(self):
        return self.uw

    def start(self):
        self.polls = 0

    def poll(self):
        self.polls += 1

    def stop(self):
        return self.energy_uj, self.polls


class Runner(base.Runner):
    """Takes `lap_us`, or what `laps` holds, for an inference; its output is the input's beginning, turned over."""

    name = "simulator"
    version = "1"
    model_sha256 = "ab" * 32
    arena_bytes = 210288
    input_bytes = 12
    output_bytes = 4

    def __init__(self, clock):
        self.clock = clock
        self.lap_us = 50000
        self.laps = []
        self.fault = None
        self.calls = 0
        self.input = b""

    def set_input(self, data):
        if len(data) != self.input_bytes:
            raise base.RunnerError(f"The input has {len(data)} bytes.")
        self.input = data

    def invoke(self):
        self.calls += 1
        if self.fault:
            raise base.RunnerError(self.fault)
        self.clock.now += self.laps.pop(0) if self.laps else self.lap_us

    def output(self):
        return bytes([255 - byte for byte in self.input[:4]])


class Camera(base.Camera):
    def __init__(self):
        self.frames = 0

    def frame(self):
        self.frames += 1
        return bytes([self.frames & 255]) * 12


class Board(base.Board):
    name = "esp32s3-n16r8"
    clock_hz = 240000000
    firmware_sha256 = "cd" * 32

    def __init__(self, seed=1):
        self.collected = 0
        self.state = seed

    def reset_reason(self):
        return "power_on"

    def heap_free(self):
        return 123456

    def unique_id(self):
        return "a0b1c2d3e4f5"

    def random_bytes(self, count):
        """A linear congruential generator's."""
        data = bytearray()
        for _ in range(count):
            self.state = (self.state * 1103515245 + 12345) & 0x7FFFFFFF
            data.append((self.state >> 16) & 255)
        return bytes(data)

    def collect(self):
        self.collected += 1
        collect_garbage()


def collect_garbage():
    """Where the heap is small: in MicroPython."""
    if hasattr(gc, "mem_free"):
        gc.collect()


def port(http=None, storage=None, clock=None, seed=1):
    """A whole port; `http` is the service of service.py, or None where nothing is sent."""
    if clock is None:
        clock = Clock()
    return base.Port(
        clock=clock,
        network=Network(),
        http=http or base.Http(),
        storage=Storage() if storage is None else storage,
        power=Power(),
        runner=Runner(clock),
        camera=Camera(),
        board=Board(seed),
    )


def golden_file(count=2):
    """Golden inputs 0, 1, ... of twelve equal bytes, with the outputs of the runner above."""
    data = b"OGLD" + count.to_bytes(4, "little") + (12).to_bytes(4, "little") + (4).to_bytes(4, "little")
    for place in range(count):
        data += bytes([place]) * 12 + bytes([255 - place]) * 4
    return data


def equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def raises(kind: type, function, *arguments) -> str:
    """The message of the error."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
