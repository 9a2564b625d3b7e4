"""The board's clock, network and own facts, and pictures as its inputs: a real NTP server, stand-ins for modules."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from esp32_agent.port import files
from esp32_agent.port.base import CameraError, RunnerError
from esp32_agent.port.files import golden_input
from esp32_agent.port.host import cameras
from esp32_agent.port.host.cameras import FolderInput
from esp32_agent.port.micropython import board
from esp32_agent.port.micropython import wifi as board_wifi
from esp32_agent.port.micropython.board import Esp32Board
from esp32_agent.port.micropython.wifi import JOIN_MS, WiFi
from esp32_agent.port.pictures import rgb565_tensor, rgb_tensor, yuyv_tensor
from tests.edge.port.test_power import SteppedClock
from tests.edge.tools import micropython

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("on_device.py")
NOW_S = 1_800_000_000
NTP_S = NOW_S + board.SECONDS_1900_TO_1970
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
        [*program, str(SCRIPT), "time", str(port), "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
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
    assert board.read_packet(answer, NONCE) is None


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


RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
KERNEL = r"""
#include <linux/videodev2.h>
#include <cstddef>
#include <cstdio>
#define P(name, value) std::printf("%s %lu\n", name, (unsigned long)(value))
int main() {
    P("QUERYCAP", VIDIOC_QUERYCAP); P("S_FMT", VIDIOC_S_FMT); P("REQBUFS", VIDIOC_REQBUFS);
    P("QUERYBUF", VIDIOC_QUERYBUF); P("QBUF", VIDIOC_QBUF); P("DQBUF", VIDIOC_DQBUF); P("STREAMON", VIDIOC_STREAMON);
    P("CAPTURE", V4L2_BUF_TYPE_VIDEO_CAPTURE); P("MEMORY_MAP", V4L2_MEMORY_MMAP); P("FIELD_NONE", V4L2_FIELD_NONE);
    P("YUYV", V4L2_PIX_FMT_YUYV); P("CAN_CAPTURE", V4L2_CAP_VIDEO_CAPTURE); P("CAN_STREAM", V4L2_CAP_STREAMING);
    P("Capability.device_caps", offsetof(v4l2_capability, device_caps));
    P("Format.width", offsetof(v4l2_format, fmt.pix.width));
    P("Format.pixelformat", offsetof(v4l2_format, fmt.pix.pixelformat));
    P("Format.bytesperline", offsetof(v4l2_format, fmt.pix.bytesperline));
    P("RequestBuffers.memory", offsetof(v4l2_requestbuffers, memory));
    P("Buffer.bytesused", offsetof(v4l2_buffer, bytesused)); P("Buffer.memory", offsetof(v4l2_buffer, memory));
    P("Buffer.offset", offsetof(v4l2_buffer, m.offset)); P("Buffer.length", offsetof(v4l2_buffer, length));
}
"""


def tensor(*pixels: tuple[int, int, int]) -> bytes:
    """What these pixels become: p - 128 as int8."""
    return bytes((value - 128) % 256 for pixel in pixels for value in pixel)


def quarters(width: int, height: int) -> bytes:
    """A picture of four colours: red and green above, blue and white below."""
    rows = [RED] * (width // 2) + [GREEN] * (width // 2), [BLUE] * (width // 2) + [WHITE] * (width // 2)
    return b"".join(bytes(v for pixel in rows[row * 2 // height] for v in pixel) for row in range(height))


def test_a_picture_becomes_int8() -> None:
    assert rgb_tensor(quarters(4, 4), 4, 4, 2, 3) == tensor(RED, GREEN, BLUE, WHITE)
    assert rgb_tensor(quarters(4, 4), 4, 4, 2, 1) == bytes((g - 128) % 256 for g in (76, 149, 28, 255))


def test_the_middle_square_of_a_wide_picture_is_taken() -> None:
    stripes = bytes(v for _ in range(2) for pixel in (RED, GREEN, BLUE, WHITE) for v in pixel)
    assert rgb_tensor(stripes, 4, 2, 2, 3) == tensor(GREEN, BLUE, GREEN, BLUE)


def test_the_boards_camera_gives_565_with_the_high_byte_first() -> None:
    data = b"".join(value.to_bytes(2, "big") for value in (0xF800, 0x07E0, 0x001F, 0xFFFF))
    assert rgb565_tensor(data, 2, 2, 2, 3) == tensor(RED, GREEN, BLUE, WHITE)


def test_a_webcam_gives_yuyv() -> None:
    """Black, white and a red in BT.601's limited range."""
    data = bytes([16, 128, 235, 128]) + bytes([81, 90, 81, 240])
    black, white, red, _ = (yuyv_tensor(data, 2, 2, 2, 3)[at : at + 3] for at in (0, 3, 6, 9))
    assert (black, white) == (tensor((0, 0, 0)), tensor(WHITE))
    assert [value ^ 0x80 for value in red] == pytest.approx([255, 0, 0], abs=2)


def test_a_folder_is_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(b"P6\n# four colours\n4 4\n255\n" + quarters(4, 4))
    (tmp_path / "b.pgm").write_bytes(b"P5 2 2 255\n" + bytes([0, 10, 200, 255]))
    (tmp_path / "notes.txt").write_text("not a picture")
    folder = FolderInput(tmp_path, 12)
    first, second, third = folder.frame(), folder.frame(), folder.frame()
    assert first == third == tensor(RED, GREEN, BLUE, WHITE)
    assert second == tensor(*((grey,) * 3 for grey in (0, 10, 200, 255)))
    assert folder.name == "folder"


@pytest.mark.parametrize(
    "content",
    [b"", b"P6", b"P6 4 4 255\n" + bytes(47), b"P6 4 4 65535\n" + bytes(96), b"P3 1 1 255\n1 2 3", b"P6 x 4 255\n",
     b"P6 0 4 255\n", b"P6 99999999 99999999 255\n"],
)  # fmt: skip
def test_a_picture_that_is_damaged_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ppm").write_bytes(content)
    with pytest.raises(CameraError, match=re.escape(str(tmp_path / "a.ppm"))):
        FolderInput(tmp_path, 12).frame()


@pytest.mark.slow
def test_the_ioctl_numbers_and_layouts_are_the_kernels(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    subprocess.run(["g++", str(source), "-o", str(tmp_path / "kernel")], check=True)
    printed = subprocess.run([str(tmp_path / "kernel")], capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        name, value = line.split()
        structure, _, member = name.partition(".")
        ours = getattr(cameras, structure)
        assert (getattr(ours, member).offset if member else ours) == int(value), name


@pytest.mark.parametrize("content", [b"", b"OGLD", b"XXXX" + bytes(20), b"OGLD" + bytes(20)])
def test_golden_inputs_that_do_not_fit_are_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "golden.bin").write_bytes(content)
    with pytest.raises(RunnerError, match=re.escape(str(tmp_path / "golden.bin"))):
        golden_input(str(tmp_path / "golden.bin"), 3)
