"""The port of an ESP32-S3 under MicroPython."""

import os

from esp32_agent.port import parts
from esp32_agent.port.base import Camera, Clock, Port, Runner
from esp32_agent.port.micropython.board import BoardClock, Esp32Board, FlashStorage, set_rtc
from esp32_agent.port.micropython.wifi import WiFi
from esp32_agent.port.micropython.wire import SocketWire, tls_context
from esp32_agent.section import ConfigError, Section

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

I2C_HZ = 400_000
UART_TIMEOUT_MS = 50
UART_BUFFER = 2048


def build(config: Section) -> Port:
    """Raises ConfigError and PortError."""
    import machine
    import network

    if config.wifi is None:
        raise ConfigError("`wifi` is missing: a board needs the network's ssid and password.")
    board = Esp32Board(config.board, parts.firmware_sha256(os.uname().version), machine)
    clock = BoardClock(config.ntp, set_rtc)
    runner = make_runner(config, clock, machine)
    return Port(
        clock=clock,
        network=WiFi(network.WLAN(network.STA_IF), config.wifi.ssid, config.wifi.password or "", clock),
        http=parts.http_client(config, SocketWire, tls_context),
        storage=FlashStorage(config.data),
        power=parts.power(config, clock, lambda settings: open_bus(machine, settings)),
        runner=runner,
        camera=make_camera(config, runner),
        board=board,
    )


def make_runner(config: Section, clock: Clock, machine: "Any") -> Runner:
    settings = config.runner
    if settings.kind == "tflm-native":
        from esp32_agent.port.micropython.native import NativeRunner

        if not settings.arena_bytes:
            raise ConfigError("`runner.arena_bytes` is missing: take the model's from its manifest.json.")
        return NativeRunner(config.model, settings.arena_bytes, settings.psram)
    if settings.kind == "tflm-serial":
        from esp32_agent.port.micropython.uart import UartLine
        from esp32_agent.port.serial_runner import SerialRunner

        uart = machine.UART(
            settings.uart,
            settings.baud,
            tx=settings.tx,
            rx=settings.rx,
            timeout=UART_TIMEOUT_MS,
            rxbuf=UART_BUFFER,
        )
        return SerialRunner(UartLine(uart))
    if settings.kind == "simulator":
        return parts.simulated_runner(config, clock)
    raise parts.unknown("runner.kind", settings.kind, "tflm-native, tflm-serial and simulator")


def make_camera(config: Section, runner: Runner) -> Camera:
    source = parts.source(config)
    if source == "fixed":
        return parts.fixed_input(config, runner)
    if source == "camera":
        from esp32_agent.port.micropython.camera import BoardCamera, open_camera

        return BoardCamera(open_camera(), runner.input_bytes)
    raise parts.unknown("input.source", source, "fixed and camera")


def open_bus(machine: "Any", settings: Section) -> "Any":
    """The I2C bus of the sensor."""
    return machine.I2C(0, sda=machine.Pin(settings.sda), scl=machine.Pin(settings.scl), freq=I2C_HZ)
