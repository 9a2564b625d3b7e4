"""The port of a host under CPython, with its TCP and TLS connections."""

import socket
import ssl
import time
from pathlib import Path

from esp32_agent.port import parts
from esp32_agent.port.base import Board, Camera, Clock, HttpError, Port, Runner
from esp32_agent.port.host.board import HostBoard, SerialBoard, system
from esp32_agent.port.host.clock import HostClock
from esp32_agent.port.host.storage import FileStorage
from esp32_agent.port.http import Wire
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.serial_runner import SerialRunner
from esp32_agent.section import ConfigError, Section

SHORTEST_S = 0.001


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


class SocketWire(Wire):
    """With a TLS `context` the server must prove that it is `host`."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, timeout_s: int) -> None:
        self._host = host
        self.limit(timeout_s)
        try:
            self._socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise self._failure(error) from None
        if context is not None:
            try:
                self._socket = context.wrap_socket(self._socket, server_hostname=host)
            except (OSError, ValueError) as error:
                self._socket.close()
                raise self._failure(error) from None

    def limit(self, timeout_s: int) -> None:
        self._deadline = time.monotonic() + timeout_s

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(error) from None

    def receive(self, count: int) -> bytes:
        self._socket.settimeout(self._left())
        try:
            return self._socket.recv(count)
        except OSError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        self._socket.close()

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), SHORTEST_S)

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(f"{self._host} did not answer in time.")
        if isinstance(error, ssl.SSLCertVerificationError):
            return HttpError(f"The certificate of {self._host} is refused: {error.verify_message}")
        return HttpError(f"The connection to {self._host} failed: {error}")


def tls_context(authority: str | None) -> ssl.SSLContext:
    """Trusts the certificates of a PEM file and no others, or those of the system with None.

    Raises OSError if the file cannot be read or holds no certificate.
    """
    return ssl.create_default_context(cafile=authority)
