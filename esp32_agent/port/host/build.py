"""The port of a host under CPython: its clock, files in a folder, each change of which is flushed to the disk before
the call returns, a TCP or TLS connection, the host in the place of a board or the board at the other end of a serial
line, and what is built of them."""

import contextlib
import errno
import gc
import hashlib
import os
import platform
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from esp32_agent.port import parts
from esp32_agent.port.base import (
    Board,
    Camera,
    Clock,
    HttpError,
    Port,
    PortError,
    Runner,
    Storage,
    StorageFullError,
)
from esp32_agent.port.http import Wire
from esp32_agent.port.micropython.wifi import Wired
from esp32_agent.port.serial_runner import SerialRunner, text, whole
from esp32_agent.section import ConfigError, Section


class HostClock(Clock):
    """Its ticks do not wrap around."""

    def ticks_us(self) -> int:
        return time.perf_counter_ns() // 1000

    def ticks_diff(self, later: int, earlier: int) -> int:
        return later - earlier

    def sleep_ms(self, ms: int) -> None:
        time.sleep(ms / 1000)

    def unix_us(self) -> int:
        return time.time_ns() // 1000

    def synchronise(self) -> bool:
        return True


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileStorage(Storage):
    """As base says; the part of an `append` that did not fit is cut off again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes | None:
        try:
            with self._path(name).open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return None

    def append(self, name: str, data: bytes) -> None:
        before = self.size(name)
        with self._opened(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            try:
                _write(file, data)
            except OSError as error:
                os.ftruncate(file, before)
                raise failure(error) from None
        if before == 0:
            self._flush_folder()

    def replace(self, name: str, data: bytes) -> None:
        new = self._path(f"{name}.new")
        try:
            with self._opened(new.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _write(file, data)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise failure(error) from None
        new.rename(self._path(name))
        self._flush_folder()

    def truncate(self, name: str, size: int) -> None:
        with self._opened(name, os.O_WRONLY) as file:
            os.ftruncate(file, size)
            os.fsync(file)

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return 0

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        self._flush_folder()

    def _path(self, name: str) -> Path:
        return self._folder / name  # a name that begins with "/" is the path itself

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(self._path(name), flags, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def _flush_folder(self) -> None:
        """A new name, or one that went, is on the disk only when its folder is."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def failure(error: OSError) -> PortError:
    """StorageFullError where the medium has no room."""
    if error.errno in FULL:
        return StorageFullError(f"The storage is full: {error.strerror}.")
    return PortError(f"The storage failed: {error}")


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.fsync(file)


SHORTEST_S = 0.001


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
        from esp32_agent.port.host.runners import TtyLine

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
        from esp32_agent.port.host.cameras import FolderInput

        return FolderInput(Path(config.input.path), runner.input_bytes)
    from esp32_agent.port.host.cameras import Webcam

    return Webcam(Path(config.input.path), runner.input_bytes)


def make_board(config: Section, runner: Runner) -> Board:
    if isinstance(runner, SerialRunner):
        return SerialBoard(config.board, runner)
    return HostBoard(config.board, parts.firmware_sha256(system()))
