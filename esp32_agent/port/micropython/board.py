"""The ESP32-S3 under MicroPython."""

import binascii
import gc
import os

from esp32_agent.port.base import Board


class Esp32Board(Board):
    """`machine` is MicroPython's module of that name."""

    def __init__(self, name: str, firmware_sha256: str, machine: object) -> None:
        self.name = name
        self.firmware_sha256 = firmware_sha256
        self._machine = machine
        frequency = machine.freq()
        self.clock_hz = frequency[0] if isinstance(frequency, tuple) else frequency

    def reset_reason(self) -> str:
        cause = self._machine.reset_cause()
        for constant, reason in (
            ("PWRON_RESET", "power_on"),
            ("HARD_RESET", "reset"),
            ("SOFT_RESET", "reset"),
            ("WDT_RESET", "watchdog"),
            ("DEEPSLEEP_RESET", "deep_sleep"),
        ):
            if getattr(self._machine, constant, None) == cause:
                return reason
        return "unknown"

    def heap_free(self) -> int:
        return gc.mem_free()

    def unique_id(self) -> str:
        return binascii.hexlify(self._machine.unique_id()).decode()

    def random_bytes(self, count: int) -> bytes:
        """From the chip's own generator, which is a true one while the radio is on."""
        return os.urandom(count)

    def collect(self) -> None:
        gc.collect()
