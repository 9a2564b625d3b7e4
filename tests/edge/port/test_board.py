"""The board's clock, network and own facts: a real NTP server, and stand-ins for the chip's modules."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from esp32_agent.port import files, ntp
from esp32_agent.port.micropython import wifi as board_wifi
from esp32_agent.port.micropython.board import Esp32Board
from esp32_agent.port.micropython.wifi import JOIN_MS, WiFi
from tests.edge.port.chips import SteppedClock
from tests.edge.tools import micropython

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("ask_time.py")
NOW_S = 1_800_000_000
NTP_S = NOW_S + ntp.SECONDS_1900_TO_1970
HALF = (2**31).to_bytes(4, "big")  # of a second


def packet(nonce: bytes, first: int = 0x24, stratum: int = 2, seconds: int = NTP_S) -> bytes:
    """An answer with the time; 0x24: no leap warning, version 4, mode 4 (server)."""
    head = bytes([first, stratum, 6, 0xE9]) + bytes(20)
    return head + nonce + seconds.to_bytes(4, "big") + HALF + seconds.to_bytes(4, "big") + HALF


@contextmanager
def time_server(answer: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """A UDP server whose answer to a question's last 8 bytes a test makes; gives its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            with suppress(OSError):
                question, client = server.recvfrom(1024)
                raw = answer(question[40:48])
                if raw is not None:
                    server.sendto(raw, client)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        try:
            yield port
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(bytes(48), ("127.0.0.1", port))  # lets a thread that still waits end
            thread.join()


def asked(interpreter: str, port: int) -> str:
    """What the script prints."""
    program = [sys.executable] if interpreter == "cpython" else [str(micropython())]
    environment = os.environ | {"MICROPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, str(SCRIPT), str(port), "1"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", ["cpython", "micropython"])
def test_the_time_is_asked_of_a_server(interpreter: str) -> None:
    with time_server(packet) as port:
        moment = int(asked(interpreter, port))
    assert 0 <= moment - (NOW_S * 1_000_000 + 500_000) < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", ["cpython", "micropython"])
def test_a_server_that_says_nothing_gives_no_time(interpreter: str) -> None:
    with time_server(lambda _: None) as port:
        assert asked(interpreter, port) == "OSError"


NONCE = b"8 bytes!"


def test_an_answer_is_read_to_the_microsecond() -> None:
    assert ntp.read_packet(packet(NONCE), NONCE) == NOW_S * 1_000_000 + 500_000


def test_the_counter_that_begins_again_in_2036_is_read() -> None:
    assert (
        ntp.read_packet(packet(NONCE, seconds=1000), NONCE)
        == (2**32 + 1000 - 2_208_988_800) * 1_000_000 + 500_000
    )


@pytest.mark.parametrize(
    "answer",
    [
        packet(NONCE)[:47],
        packet(b"another!"),
        packet(NONCE, first=0xE4),
        packet(NONCE, first=0x23),
        packet(NONCE, stratum=0),
        packet(NONCE, stratum=16),
        packet(NONCE, seconds=0),
    ],
    ids=[
        "short",
        "not to this question",
        "not synchronised",
        "a client's",
        "kiss of death",
        "no stratum",
        "no time",
    ],
)
def test_an_answer_that_is_no_time_is_none(answer: bytes) -> None:
    assert ntp.read_packet(answer, NONCE) is None


class Wlan(board_wifi.Wlan):
    """As network.WLAN: joins some steps after `connect`, or never, or its driver fails."""

    def __init__(self, steps: int | None, failure: OSError | None = None) -> None:
        self.steps = steps
        self.calls: list[str] = []
        self._failure = failure
        self._left: int | None = None

    def active(self, on: bool) -> None:
        self.calls.append(f"active {on}")

    def connect(self, ssid: str, password: str) -> None:
        if self._failure is not None:
            raise self._failure
        self.calls.append(f"connect {ssid} {password}")
        self._left = self.steps

    def disconnect(self) -> None:
        self.calls.append("disconnect")

    def isconnected(self) -> bool:
        if self._left is None:
            return False
        self._left = max(0, self._left - 1)
        return self._left == 0

    def status(self, what: str | None = None) -> int:
        return -61 if what == "rssi" else 202


def test_the_board_joins_the_network_once() -> None:
    wlan = Wlan(steps=5)
    wifi = WiFi(wlan, "home", "secret", SteppedClock())
    assert wifi.rssi() is None
    assert wifi.connect()
    assert wifi.connect()
    assert wifi.rssi() == -61
    assert wlan.calls == ["active True", "disconnect", "connect home secret", "active True"]


def test_a_network_that_does_not_let_the_board_in_is_left_in_time() -> None:
    clock = SteppedClock()
    wifi = WiFi(Wlan(steps=None), "home", "wrong", clock)
    assert not wifi.connect()
    assert clock.now_us == JOIN_MS * 1000
    assert wifi.reason == "The Wi-Fi network home did not let the board in (status 202)."


def test_a_driver_that_fails_is_no_crash() -> None:
    wifi = WiFi(Wlan(steps=1, failure=OSError("Wifi Internal State Error")), "home", "secret", SteppedClock())
    assert not wifi.connect()
    assert wifi.reason == "The Wi-Fi driver failed: Wifi Internal State Error"


class Machine:
    """As MicroPython's module machine on an ESP32-S3."""

    PWRON_RESET, HARD_RESET, WDT_RESET, DEEPSLEEP_RESET, SOFT_RESET = range(1, 6)

    def __init__(self, cause: int) -> None:
        self._cause = cause

    def freq(self) -> int:
        return 240_000_000

    def reset_cause(self) -> int:
        return self._cause

    def unique_id(self) -> bytes:
        return b"\x24\x6f\x28\x01\x02\x03"


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(1, "power_on"), (2, "reset"), (3, "watchdog"), (4, "deep_sleep"), (5, "reset"), (99, "unknown")],
)
def test_the_board_says_why_it_booted(cause: int, reason: str) -> None:
    board = Esp32Board("esp32s3-n16r8", "f" * 64, Machine(cause))
    assert board.reset_reason() == reason
    assert (board.clock_hz, board.unique_id()) == (240_000_000, "246f28010203")


def test_the_firmwares_digest_follows_the_files_and_the_system(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("a = 1\n")
    (tmp_path / "b.mpy").write_bytes(b"M\x06")
    first = files.code_sha256(str(tmp_path), "1.28")
    (tmp_path / "notes.txt").write_text("not code")
    assert files.code_sha256(str(tmp_path), "1.28") == first
    assert files.code_sha256(str(tmp_path), "1.29") != first
    (tmp_path / "core" / "a.py").write_text("a = 2\n")
    assert files.code_sha256(str(tmp_path), "1.28") != first
