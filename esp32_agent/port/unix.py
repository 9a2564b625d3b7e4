"""The port of MicroPython's unix build: a board's code on a host, with a simulated model."""

import binascii
import gc
import hashlib
import os
import sys

from esp32_agent.port import parts
from esp32_agent.port.base import Board, Port
from esp32_agent.port.micropython.board import BoardClock, FlashStorage
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.micropython.wire import SocketWire, tls_context
from esp32_agent.section import Section

PROCESSOR = "/proc/cpuinfo"
MACHINE_ID = "/etc/machine-id"


class UnixBoard(Board):
    def __init__(self, name: str, firmware_sha256: str) -> None:
        self.name = name
        self.firmware_sha256 = firmware_sha256
        self.clock_hz = clock_hz()

    def reset_reason(self) -> str:
        return "unknown"

    def heap_free(self) -> int:
        return gc.mem_free()

    def unique_id(self) -> str:
        try:
            with open(MACHINE_ID, "rb") as file:
                name = file.read()
        except OSError:
            name = b"unix"
        return binascii.hexlify(hashlib.sha256(name).digest()).decode()[:12]

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def collect(self) -> None:
        gc.collect()


def clock_hz() -> int:
    """The processor's clock of this moment; 0 where the system does not say."""
    try:
        with open(PROCESSOR) as file:
            for _ in range(64):
                line = file.readline()
                if line.startswith("cpu MHz"):
                    return int(line.split(":")[1].split(".")[0].strip()) * 1_000_000
    except OSError:
        pass
    return 0


def build(config: Section) -> Port:
    """Raises ConfigError and PortError."""
    if config.runner.kind != "simulator":
        raise parts.unknown("runner.kind", config.runner.kind, "simulator")
    if parts.source(config) != "fixed":
        raise parts.unknown("input.source", parts.source(config), "fixed")
    clock = BoardClock()
    runner = parts.simulated_runner(config, clock)
    return Port(
        clock=clock,
        network=Wired(),
        http=parts.http_client(config, SocketWire, tls_context),
        storage=FlashStorage(config.data),
        power=parts.power(config, clock, None),
        runner=runner,
        camera=parts.fixed_input(config, runner),
        board=UnixBoard(config.board, parts.firmware_sha256(sys.version)),
    )
