"""What a board is under MicroPython: its clock, with wrap-around ticks and a real-time clock that is set from an NTP
server (RFC 5905, client mode, in integers), the files of its file system, littlefs on the board and the host's under
the unix port, and the ESP32-S3 itself."""

import binascii
import gc
import os
import socket
import time

from esp32_agent.port.base import Board, Clock, PortError, Storage, StorageFullError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NTP_PORT = 123
PACKET_BYTES = 48
CLIENT = 0x23  # no leap warning, version 4, mode 3
SERVER_MODE = 4
UNKNOWN_LEAP = 3
HALF_ERA_S = 2**31
ERA_S = 2**32
SECONDS_1900_TO_1970 = 2_208_988_800


def ask(host: str, port: int, clock: Clock, nonce: bytes, timeout_s: int) -> int | None:
    """Microseconds since 1970 at the moment of the answer; None without a good one. Raises OSError.

    `nonce` has 8 random bytes: an answer that does not hold them is not to this question.
    """
    address = socket.getaddrinfo(host, port, 0, socket.SOCK_DGRAM)[0]
    question = bytes([CLIENT]) + bytes(39) + nonce
    asking = socket.socket(address[0], socket.SOCK_DGRAM)
    try:
        asking.settimeout(timeout_s)
        sent = clock.ticks_us()
        asking.sendto(question, address[-1])
        packet = asking.recv(PACKET_BYTES)
        round_trip = clock.ticks_diff(clock.ticks_us(), sent)
    finally:
        asking.close()
    moment = read_packet(packet, nonce)
    return None if moment is None else moment + round_trip // 2


def read_packet(packet: bytes, nonce: bytes) -> int | None:
    """Microseconds since 1970 when the server sent it; None if it is no answer of a synchronised server to `nonce`."""
    if len(packet) < PACKET_BYTES:
        return None
    leap, mode, stratum = packet[0] >> 6, packet[0] & 7, packet[1]
    if leap == UNKNOWN_LEAP or mode != SERVER_MODE or not 0 < stratum < 16 or packet[24:32] != nonce:
        return None
    seconds = int.from_bytes(packet[40:44], "big")
    fraction = int.from_bytes(packet[44:48], "big")
    if seconds == 0:
        return None
    if seconds < HALF_ERA_S:  # the counter begins again in 2036
        seconds += ERA_S
    return (seconds - SECONDS_1900_TO_1970) * 1_000_000 + (fraction * 1_000_000 >> 32)


SECONDS_1970_TO_2000 = 946_684_800
EARLIEST_US = 1_735_689_600_000_000
"""2025-01-01: a clock before that was never set."""
TIMEOUT_S = 5


class BoardClock(Clock):
    """`set_time(unix_us)` sets the real-time clock, by which TLS judges certificates; None: the system keeps it."""

    def __init__(self, server: str = "", set_time: "Callable[[int], None] | None" = None) -> None:
        self._server = server
        self._set_time = set_time
        self._epoch_us = SECONDS_1970_TO_2000 * 1_000_000 if time.gmtime(0)[0] == 2000 else 0

    def ticks_us(self) -> int:
        return time.ticks_us()

    def ticks_diff(self, later: int, earlier: int) -> int:
        return time.ticks_diff(later, earlier)

    def sleep_ms(self, ms: int) -> None:
        time.sleep_ms(ms)

    def unix_us(self) -> int:
        now = time.time_ns() // 1000 + self._epoch_us
        return now if now >= EARLIEST_US else 0

    def synchronise(self) -> bool:
        if self._set_time is not None:
            try:
                now = ask(self._server, NTP_PORT, self, os.urandom(8), TIMEOUT_S)
            except OSError:
                now = None
            if now is not None and now >= EARLIEST_US:
                self._set_time(now)
        return self.unix_us() > 0


def set_rtc(unix_us: int) -> None:
    """Sets the ESP32's real-time clock, whose last field counts microseconds."""
    import machine

    offset = SECONDS_1970_TO_2000 if time.gmtime(0)[0] == 2000 else 0
    year, month, day, hour, minute, second, weekday = time.gmtime(unix_us // 1_000_000 - offset)[:7]
    machine.RTC().datetime((year, month, day, weekday, hour, minute, second, unix_us % 1_000_000))


ENOENT = 2
EEXIST = 17
FULL = (27, 28, 122)  # EFBIG, ENOSPC, EDQUOT
COPY_BYTES = 1024
SIZE = 6  # of the fields of os.stat


class FlashStorage(Storage):
    """littlefs keeps the old content of a file whose write failed, or was cut off by the power."""

    def __init__(self, folder: str) -> None:
        self._folder = folder.rstrip("/")
        make_folder(self._folder)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes | None:
        try:
            with open(self._path(name), "rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            if error.errno == ENOENT:
                return None
            raise

    def append(self, name: str, data: bytes) -> None:
        self._write(self._path(name), "ab", data)

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._write(f"{path}.new", "wb", data)
            self._rename(f"{path}.new", path)
        except PortError:
            self.remove(f"{name}.new")
            raise

    def truncate(self, name: str, size: int) -> None:
        """By a copy, since MicroPython's files cannot be cut."""
        path = self._path(name)
        try:
            with open(path, "rb") as old, open(f"{path}.new", "wb") as new:
                left = size
                while left:
                    piece = old.read(min(left, COPY_BYTES))
                    if not piece:
                        break
                    new.write(piece)
                    left -= len(piece)
            sync()
        except OSError as error:
            self.remove(f"{name}.new")
            raise failure(error) from None
        self._rename(f"{path}.new", path)

    def size(self, name: str) -> int:
        try:
            return int(os.stat(self._path(name))[SIZE])
        except OSError:
            return 0

    def remove(self, name: str) -> None:
        try:
            os.remove(self._path(name))
        except OSError as error:
            if error.errno != ENOENT:
                raise

    def _path(self, name: str) -> str:
        return name if name.startswith("/") else f"{self._folder}/{name}"

    def _write(self, path: str, mode: str, data: bytes) -> None:
        try:
            with open(path, mode) as file:
                written = file.write(data)
            sync()
        except OSError as error:
            raise failure(error) from None
        if written != len(data):
            raise StorageFullError("The storage is full.")

    def _rename(self, old: str, new: str) -> None:
        try:
            os.rename(old, new)
        except OSError as error:
            if error.errno == EEXIST:
                raise PortError(
                    "The file system cannot replace files: format the flash with littlefs."
                ) from None
            raise failure(error) from None


def failure(error: OSError) -> PortError:
    """StorageFullError where the medium has no room."""
    if error.errno in FULL:
        return StorageFullError("The storage is full.")
    return PortError(f"The storage failed: {error}")


def sync() -> None:
    """Flush to the medium, in builds that keep unwritten blocks; littlefs writes when a file is closed."""
    if hasattr(os, "sync"):
        os.sync()


def make_folder(path: str) -> None:
    """Make the folder, and those above it, where they are missing."""
    done = ""
    for part in path.split("/"):
        done += part
        if done:
            try:
                os.mkdir(done)
            except OSError as error:
                if error.errno != EEXIST:
                    raise
        done += "/"


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
