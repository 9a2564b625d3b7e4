"""The parts of a simulated device except for its network: clock, storage, power, runner, board."""

import hashlib
import random
import secrets
import time

from esp32_agent.port.base import Board, Camera, Clock, Network, Power, Storage, StorageFullError
from esp32_agent.port.simulated.faults import Faults, Reboot
from esp32_agent.port.simulator import SimulatedRunner, simulated_output

TICKS = 1 << 30
MODEL_SHA256 = hashlib.sha256(b"OptiGPU's simulated model").hexdigest()
FIRMWARE_SHA256 = hashlib.sha256(b"OptiGPU's simulated firmware").hexdigest()
INPUT_BYTES, OUTPUT_BYTES = 192, 10
GOLDEN = 2
BOARD = "esp32s3-n16r8"
HOUR_US = 3_600_000_000


class Oscillator:
    """How a device's clock is off, the same after each boot."""

    def __init__(self, faults: Faults) -> None:
        self.speed = 1 + (faults.within(-0.01, 0.01) if faults.strikes("drift") else 0.0)
        self.first_tick = int(faults.within(0, TICKS))
        self.is_set = not faults.strikes("unsynchronised")
        self.skew_us = int(faults.within(1, 24) * HOUR_US) if faults.strikes("skew") else 0


class SimulatedClock(Clock):
    """Real time, of which a simulated inference may be ahead until `settle`; its ticks wrap around as a board's."""

    def __init__(self, oscillator: Oscillator) -> None:
        self._started = time.monotonic()
        self._now_us = 0
        self._its = oscillator

    def ticks_us(self) -> int:
        return (self._its.first_tick + int(self._look_us() * self._its.speed)) % TICKS

    def ticks_diff(self, later: int, earlier: int) -> int:
        return (later - earlier + TICKS // 2) % TICKS - TICKS // 2

    def sleep_ms(self, ms: int) -> None:
        self._look_us()
        self._now_us += ms * 1000
        self.settle()

    def unix_us(self) -> int:
        return time.time_ns() // 1000 + self._its.skew_us if self._its.is_set else 0

    def synchronise(self) -> bool:
        return self._its.is_set

    def advance(self, us: int) -> None:
        """So much time passes on the device."""
        self._now_us = self._look_us() + us

    def settle(self) -> None:
        """Waits until as much time has really passed: who is asked from now on sees the device's times as true."""
        ahead_s = self._now_us / 1e6 - (time.monotonic() - self._started)
        if ahead_s > 0:
            time.sleep(ahead_s)

    def _look_us(self) -> int:
        self._now_us = max(self._now_us, int((time.monotonic() - self._started) * 1e6))
        return self._now_us


class SimulatedStorage(Storage):
    """Files in memory that outlive a reboot."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._files: dict[str, bytes] = {}
        self.is_cut = False
        """Whether the next bytes that are appended are cut off by the end of the power."""

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes | None:
        data = self._files.get(name)
        return None if data is None else data[offset:] if size < 0 else data[offset : offset + size]

    def append(self, name: str, data: bytes) -> None:
        part = int(self._faults.within(0, len(data)))
        if self.is_cut:
            self.is_cut = False
            self._files[name] = self._files.get(name, b"") + data[:part]
            raise Reboot
        if len(data) > 64 and self._faults.strikes("storage_full"):
            self._files[name] = self._files.get(name, b"") + data[:part]
            raise StorageFullError("The simulated medium is full.")
        self._files[name] = self._files.get(name, b"") + data

    def replace(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def truncate(self, name: str, size: int) -> None:
        self._files[name] = self._files[name][:size]

    def size(self, name: str) -> int:
        return len(self._files.get(name, b""))

    def remove(self, name: str) -> None:
        self._files.pop(name, None)


class SimulatedPower(Power):
    """Sums what the inferences take. It reads no power of a moment, which would take a second of each run."""

    source = "simulated"

    def __init__(self) -> None:
        self._energy_uj = 0
        self._samples = 0

    def start(self) -> None:
        self._energy_uj = self._samples = 0

    def stop(self) -> tuple[int | None, int]:
        return self._energy_uj, self._samples

    def spend(self, power_mw: int, us: int) -> None:
        """So much power for so long."""
        self._energy_uj += power_mw * us // 1000
        self._samples += 1


class SeededRunner(SimulatedRunner):
    """Inferences of the device's own latency and power, each a little different."""

    def __init__(self, clock: SimulatedClock, power: SimulatedPower, seed: str) -> None:
        super().__init__(clock, MODEL_SHA256, INPUT_BYTES, OUTPUT_BYTES, 0)
        self._random = random.Random(seed)
        self._typical_us = self._random.randint(15_000, 35_000)
        self._power_mw = self._random.randint(250, 600)
        self._time, self._power = clock, power
        self.arena_bytes = 40_000

    def invoke(self) -> None:
        us = int(self._typical_us * self._random.lognormvariate(0, 0.02))
        self._time.advance(us)
        self._power.spend(self._power_mw, us)


class SimulatedNetwork(Network):
    """Always joined."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._typical = self._random.randint(-80, -45)

    def connect(self) -> bool:
        return True

    def rssi(self) -> int | None:
        return self._typical + self._random.randint(-3, 3)


class SimulatedCamera(Camera):
    """One and the same input."""

    def frame(self) -> bytes:
        return golden_input(0)


class SimulatedBoard(Board):
    """A board of the catalog."""

    name = BOARD
    clock_hz = 240_000_000
    firmware_sha256 = FIRMWARE_SHA256

    def __init__(self, number: int, reset_reason: str) -> None:
        self._number, self._reason = number, reset_reason

    def reset_reason(self) -> str:
        return self._reason

    def heap_free(self) -> int:
        return 100_000

    def unique_id(self) -> str:
        return f"{self._number:012x}"

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def collect(self) -> None:
        """Its garbage is the simulator's."""


def golden_input(number: int) -> bytes:
    """The golden input of that number, from 0."""
    return bytes((number * 31 + place) % 256 for place in range(INPUT_BYTES))


def golden_outputs() -> list[bytes]:
    """What the simulated model answers to the golden inputs."""
    return [simulated_output(MODEL_SHA256, golden_input(number), OUTPUT_BYTES) for number in range(GOLDEN)]


def golden_file() -> bytes:
    """The golden inputs as a device keeps them."""
    sizes = (GOLDEN, INPUT_BYTES, OUTPUT_BYTES)
    head = b"OGLD" + b"".join(size.to_bytes(4, "little") for size in sizes)
    return head + b"".join(golden_input(number) + output for number, output in enumerate(golden_outputs()))
