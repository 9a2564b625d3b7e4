"""The port of MicroPython's unix build: a board's code on a host, with a simulated model."""

import sys

from esp32_agent.port import parts
from esp32_agent.port.base import Port
from esp32_agent.port.micropython.clock import BoardClock
from esp32_agent.port.micropython.storage import FlashStorage
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.micropython.wire import SocketWire, tls_context
from esp32_agent.port.unix.board import UnixBoard
from esp32_agent.section import Section


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
