"""The port of a host under CPython."""

from pathlib import Path

from esp32_agent.port import parts
from esp32_agent.port.base import Board, Camera, Clock, Port, Runner
from esp32_agent.port.host.board import HostBoard, SerialBoard, system
from esp32_agent.port.host.clock import HostClock
from esp32_agent.port.host.storage import FileStorage
from esp32_agent.port.host.wire import SocketWire, tls_context
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.serial_runner import SerialRunner
from esp32_agent.section import ConfigError, Section


def build(config: Section) -> Port:
    """Raises ConfigError and PortError."""
    clock = HostClock()
    runner = make_runner(config, clock)
    return Port(
        clock=clock,
        network=Wired(),
        http=parts.http_client(config, SocketWire, tls_context),
        storage=FileStorage(Path(config.data)),
        power=parts.power(config, clock, None),
        runner=runner,
        camera=make_camera(config, runner),
        board=make_board(config, runner),
    )


def make_runner(config: Section, clock: Clock) -> Runner:
    settings = config.runner
    if settings.kind == "tflm-host":
        from esp32_agent.port.host.runners import TflmRunner

        return TflmRunner(Path(config.model), settings.arena_bytes)
    if settings.kind == "litert-host":
        from esp32_agent.port.host.runners import LiteRtRunner

        return LiteRtRunner(Path(config.model))
    if settings.kind == "tflm-serial":
        from esp32_agent.port.host.tty import TtyLine

        return SerialRunner(TtyLine(settings.device, settings.baud))
    if settings.kind == "simulator":
        return parts.simulated_runner(config, clock)
    raise parts.unknown("runner.kind", settings.kind, "tflm-host, litert-host, tflm-serial and simulator")


def make_camera(config: Section, runner: Runner) -> Camera:
    source = parts.source(config)
    if source == "fixed":
        return parts.fixed_input(config, runner)
    if source == "camera":
        raise parts.unknown("input.source", source, "fixed, folder and v4l2")
    if config.input.path is None:
        raise ConfigError(f"`input.path` is missing: the path of the {source}.")
    if source == "folder":
        from esp32_agent.port.host.folder import FolderInput

        return FolderInput(Path(config.input.path), runner.input_bytes)
    from esp32_agent.port.host.v4l2 import Webcam

    return Webcam(Path(config.input.path), runner.input_bytes)


def make_board(config: Section, runner: Runner) -> Board:
    if isinstance(runner, SerialRunner):
        return SerialBoard(config.board, runner)
    return HostBoard(config.board, parts.firmware_sha256(system()))
