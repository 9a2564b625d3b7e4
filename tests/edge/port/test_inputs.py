"""Pictures as tensors, folders of pictures, and the webcam's ioctl against the kernel's own header."""

import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from esp32_agent.port.base import CameraError, RunnerError
from esp32_agent.port.files import golden_input
from esp32_agent.port.host import v4l2
from esp32_agent.port.host.folder import FolderInput
from esp32_agent.port.micropython.camera import BoardCamera
from esp32_agent.port.pictures import picture_shape, rgb565_tensor, rgb_tensor, yuyv_tensor

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


@pytest.mark.parametrize(
    ("count", "shape"), [(27_648, (96, 3)), (9216, (96, 1)), (150_528, (224, 3)), (3, (1, 3))]
)
def test_the_shape_of_a_square_picture(count: int, shape: tuple[int, int]) -> None:
    assert picture_shape(count) == shape


def test_an_input_that_is_no_picture_is_said() -> None:
    with pytest.raises(CameraError, match="1960 bytes is no square picture"):
        picture_shape(1960)


def test_a_frame_that_broke_off_is_said() -> None:
    with pytest.raises(CameraError, match="The frame has 5 bytes and not 12"):
        rgb_tensor(bytes(5), 2, 2, 2, 3)


def test_a_folder_is_read_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(b"P6\n# four colours\n4 4\n255\n" + quarters(4, 4))
    (tmp_path / "b.pgm").write_bytes(b"P5 2 2 255\n" + bytes([0, 10, 200, 255]))
    (tmp_path / "notes.txt").write_text("not a picture")
    folder = FolderInput(tmp_path, 12)
    first, second, third = folder.frame(), folder.frame(), folder.frame()
    assert first == third == tensor(RED, GREEN, BLUE, WHITE)
    assert second == tensor(*((grey,) * 3 for grey in (0, 10, 200, 255)))
    assert folder.name == "folder"


def test_a_compressed_picture_is_read(tmp_path: Path) -> None:
    Image.frombytes("RGB", (4, 4), quarters(4, 4)).save(tmp_path / "a.png")
    assert FolderInput(tmp_path, 12).frame() == tensor(RED, GREEN, BLUE, WHITE)


@pytest.mark.parametrize(
    "content",
    [b"", b"P6", b"P6 4 4 255\n" + bytes(47), b"P6 4 4 65535\n" + bytes(96), b"P3 1 1 255\n1 2 3", b"P6 x 4 255\n",
     b"P6 0 4 255\n", b"P6 99999999 99999999 255\n"],
)  # fmt: skip
def test_a_picture_that_is_damaged_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ppm").write_bytes(content)
    with pytest.raises(CameraError, match=re.escape(str(tmp_path / "a.ppm"))):
        FolderInput(tmp_path, 12).frame()


def test_a_folder_without_pictures_is_said(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="has no picture"):
        FolderInput(tmp_path, 12)
    with pytest.raises(CameraError, match="does not exist"):
        FolderInput(tmp_path / "none", 12)


class BoardsDriver:
    """The camera's class on the board, with a frame or a failure."""

    def __init__(self, frame: bytes | OSError | None) -> None:
        self._frame = frame

    def capture(self) -> bytes | None:
        if isinstance(self._frame, OSError):
            raise self._frame
        return self._frame


def test_the_boards_camera_gives_an_input() -> None:
    frame = BoardCamera(BoardsDriver(b"\xf8\x00" * 320 * 240), 12).frame()
    assert frame == tensor(RED, RED, RED, RED)


@pytest.mark.parametrize("frame", [None, b"", b"\xf8" * 100, OSError("no camera")])
def test_the_boards_camera_that_fails_is_said(frame: bytes | OSError | None) -> None:
    with pytest.raises(CameraError):
        BoardCamera(BoardsDriver(frame), 12).frame()


@pytest.mark.slow
def test_the_ioctl_numbers_and_layouts_are_the_kernels(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    subprocess.run(["g++", str(source), "-o", str(tmp_path / "kernel")], check=True)
    printed = subprocess.run([str(tmp_path / "kernel")], capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        name, value = line.split()
        structure, _, member = name.partition(".")
        ours = getattr(v4l2, structure)
        assert (getattr(ours, member).offset if member else ours) == int(value), name


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("/dev/null", "is no camera that streams YUYV"), ("/dev/video-none", "cannot be opened")],
)
def test_a_device_that_is_no_camera_is_said(path: str, sentence: str) -> None:
    with pytest.raises(CameraError, match=sentence):
        v4l2.Webcam(Path(path), 27_648)


def test_the_first_golden_input_is_the_fixed_one(tmp_path: Path) -> None:
    header = b"OGLD" + b"".join(number.to_bytes(4, "little") for number in (2, 3, 1))
    (tmp_path / "golden.bin").write_bytes(header + b"abcXdefY")
    assert golden_input(str(tmp_path / "golden.bin"), 3) == b"abc"


@pytest.mark.parametrize("content", [b"", b"OGLD", b"XXXX" + bytes(20), b"OGLD" + bytes(20)])
def test_golden_inputs_that_do_not_fit_are_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "golden.bin").write_bytes(content)
    with pytest.raises(RunnerError, match=re.escape(str(tmp_path / "golden.bin"))):
        golden_input(str(tmp_path / "golden.bin"), 3)
