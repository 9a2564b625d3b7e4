"""A host in the place of a board, and the board at the other end of a serial line."""

import gc
import hashlib
import os
import platform
import secrets
from pathlib import Path

from esp32_agent.port.base import Board
from esp32_agent.port.serial_runner import SerialRunner, text, whole

FREQUENCY = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
PROCESSOR = Path("/proc/cpuinfo")
MACHINE_ID = Path("/etc/machine-id")


class HostBoard(Board):
    """A report of a host ranks nowhere, whatever name it gives."""

    def __init__(self, name: str, firmware_sha256: str) -> None:
        self.name = name
        self.firmware_sha256 = firmware_sha256
        self.clock_hz = clock_hz()

    def reset_reason(self) -> str:
        return "unknown"

    def heap_free(self) -> int:
        return 0

    def unique_id(self) -> str:
        name = MACHINE_ID.read_text() if MACHINE_ID.exists() else platform.node()
        return hashlib.sha256(name.strip().encode()).hexdigest()[:12]

    def random_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def collect(self) -> None:
        gc.collect()


class SerialBoard(HostBoard):
    """What the serial firmware says of the board that it runs on."""

    def __init__(self, name: str, runner: SerialRunner) -> None:
        super().__init__(name, text(runner.info, "firmware_sha256"))
        self._info = runner.info
        self.clock_hz = whole(runner.info, "clock_hz")

    def reset_reason(self) -> str:
        return text(self._info, "reset_reason")

    def heap_free(self) -> int:
        return whole(self._info, "heap_free")


def clock_hz() -> int:
    """The processor's highest clock, or that of this moment; 0 where the system does not say."""
    if FREQUENCY.exists():
        return int(FREQUENCY.read_text()) * 1000
    if PROCESSOR.exists():
        for line in PROCESSOR.read_text().splitlines():
            if line.startswith("cpu MHz"):
                return int(float(line.partition(":")[2]) * 1_000_000)
    return 0


def system() -> str:
    """What the agent's own files run on, for the firmware's digest."""
    return f"{platform.python_implementation()} {platform.python_version()} {os.uname().sysname}"
