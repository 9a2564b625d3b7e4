"""Inputs of a host: pictures of a folder in the place of a camera, one after the other and again from the start, and a
webcam."""

import ctypes
import fcntl
import mmap
import os
import select
from pathlib import Path

from esp32_agent.port.base import Camera, CameraError
from esp32_agent.port.pictures import picture_shape, rgb_tensor, yuyv_tensor

PLAIN = (".ppm", ".pgm")
COMPRESSED = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
MOST_PIXELS = 100_000_000


class FolderInput(Camera):
    """PPM and PGM need nothing; other formats need Pillow. Raises CameraError if the folder has no picture."""

    name = "folder"

    def __init__(self, folder: Path, input_bytes: int) -> None:
        self._side, self._channels = picture_shape(input_bytes)
        if not folder.is_dir():
            raise CameraError(f"The folder {folder} does not exist.")
        self._paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PLAIN + COMPRESSED)
        if not self._paths:
            raise CameraError(f"The folder {folder} has no picture: .ppm, .pgm, .png, .jpg, .bmp or .webp.")
        self._next = 0

    def frame(self) -> bytes:
        path = self._paths[self._next]
        self._next = (self._next + 1) % len(self._paths)
        read = read_plain if path.suffix.lower() in PLAIN else read_compressed
        width, height, data = read(path)
        return rgb_tensor(data, width, height, self._side, self._channels)


def read_plain(path: Path) -> tuple[int, int, bytes]:
    """Width, height and RGB bytes of a binary PPM or PGM with 8 bits a channel. Raises CameraError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CameraError(f"The picture {path} cannot be read: {error.strerror}.") from None
    fields: list[bytes] = []
    at = 0
    while len(fields) < 4 and at < len(content):
        line, _, _ = content[at:].partition(b"\n")
        if line.startswith(b"#"):
            at += len(line) + 1
            continue
        word = line.split(maxsplit=1)[:1]
        if not word:
            at += len(line) + 1
            continue
        fields.append(word[0])
        at += line.index(word[0]) + len(word[0]) + (1 if len(fields) == 4 else 0)
    return _pixels(path, fields, content[at:])


def _pixels(path: Path, fields: list[bytes], data: bytes) -> tuple[int, int, bytes]:
    if len(fields) < 4 or fields[0] not in (b"P5", b"P6") or not all(field.isdigit() for field in fields[1:]):
        raise CameraError(f"The picture {path} is no binary PPM or PGM.")
    width, height, most = (int(field) for field in fields[1:])
    channels = 3 if fields[0] == b"P6" else 1
    if most != 255 or not 0 < width * height <= MOST_PIXELS or len(data) < width * height * channels:
        raise CameraError(f"The picture {path} is cut off, or has not 8 bits a channel.")
    data = data[: width * height * channels]
    return width, height, data if channels == 3 else bytes(level for level in data for _ in range(3))


def read_compressed(path: Path) -> tuple[int, int, bytes]:
    """The same of a format that Pillow reads. Raises CameraError."""
    try:
        from PIL import Image
    except ImportError:
        raise CameraError(
            f"The picture {path} needs Pillow: pip install pillow, or convert it to .ppm."
        ) from None
    try:
        with Image.open(path) as picture:
            colour = picture.convert("RGB")
            return colour.width, colour.height, colour.tobytes()
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise CameraError(f"The picture {path} cannot be read: {error}") from None


WIDTH = 640
HEIGHT = 480
BUFFERS = 2
FRAME_S = 5
STALE_FRAMES = BUFFERS
CAPTURE = 1
MEMORY_MAP = 1
FIELD_NONE = 1
YUYV = int.from_bytes(b"YUYV", "little")
CAN_CAPTURE = 0x00000001
CAN_STREAM = 0x04000000


class Capability(ctypes.Structure):
    """struct v4l2_capability."""

    _fields_ = (
        ("driver", ctypes.c_char * 16),
        ("card", ctypes.c_char * 32),
        ("bus_info", ctypes.c_char * 32),
        ("version", ctypes.c_uint32),
        ("capabilities", ctypes.c_uint32),
        ("device_caps", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
    )


class Format(ctypes.Structure):
    """struct v4l2_format with its union as struct v4l2_pix_format; the union is aligned to 8 and has 200 bytes."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("height", ctypes.c_uint32),
        ("pixelformat", ctypes.c_uint32),
        ("field", ctypes.c_uint32),
        ("bytesperline", ctypes.c_uint32),
        ("sizeimage", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 176),
    )


class RequestBuffers(ctypes.Structure):
    """struct v4l2_requestbuffers."""

    _fields_ = (
        ("count", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("memory", ctypes.c_uint32),
        ("rest", ctypes.c_uint32 * 2),
    )


class Buffer(ctypes.Structure):
    """struct v4l2_buffer with its union as `offset`."""

    _fields_ = (
        ("index", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("bytesused", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("field", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64 * 2),
        ("timecode", ctypes.c_uint8 * 16),
        ("sequence", ctypes.c_uint32),
        ("memory", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint32),
        ("reserved2", ctypes.c_uint32),
        ("request_fd", ctypes.c_int32),
    )


def _code(direction: int, number: int, size: int) -> int:
    """_IOC of asm-generic/ioctl.h with the type 'V'."""
    return direction << 30 | size << 16 | ord("V") << 8 | number


WRITE, READ, BOTH = 1, 2, 3
QUERYCAP = _code(READ, 0, ctypes.sizeof(Capability))
S_FMT = _code(BOTH, 5, ctypes.sizeof(Format))
REQBUFS = _code(BOTH, 8, ctypes.sizeof(RequestBuffers))
QUERYBUF = _code(BOTH, 9, ctypes.sizeof(Buffer))
QBUF = _code(BOTH, 15, ctypes.sizeof(Buffer))
DQBUF = _code(BOTH, 17, ctypes.sizeof(Buffer))
STREAMON = _code(WRITE, 18, 4)


class Webcam(Camera):
    """Frames of a device such as /dev/video0 in YUYV, cut to their middle square and made smaller.

    Raises CameraError.
    """

    name = "v4l2"

    def __init__(self, path: Path, input_bytes: int) -> None:
        self._side, self._channels = picture_shape(input_bytes)
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            raise CameraError(f"The camera {path} cannot be opened: {error.strerror}.") from None
        try:
            self._width, self._height = self._configure()
            self._maps = [self._map(index) for index in range(self._request())]
            fcntl.ioctl(self._file, STREAMON, ctypes.c_uint32(CAPTURE))
        except OSError as error:
            os.close(self._file)
            raise CameraError(
                f"The device {path} is no camera that streams YUYV: {error.strerror}."
            ) from None
        except CameraError:
            os.close(self._file)
            raise

    def frame(self) -> bytes:
        """The driver fills its buffers and then waits: the first ones are as old as the last call."""
        try:
            for _ in range(STALE_FRAMES):
                self._take()
            data = self._take()
        except OSError as error:
            raise CameraError(f"The camera {self._path} failed: {error.strerror}.") from None
        return yuyv_tensor(data, self._width, self._height, self._side, self._channels)

    def _configure(self) -> tuple[int, int]:
        capability = Capability()
        fcntl.ioctl(self._file, QUERYCAP, capability)
        can = capability.device_caps or capability.capabilities
        if not can & CAN_CAPTURE or not can & CAN_STREAM:
            raise CameraError(f"The device {self._path} captures no video.")
        wanted = Format(type=CAPTURE, width=WIDTH, height=HEIGHT, pixelformat=YUYV, field=FIELD_NONE)
        fcntl.ioctl(self._file, S_FMT, wanted)
        if wanted.pixelformat != YUYV or wanted.bytesperline not in (0, 2 * wanted.width):
            raise CameraError(f"The camera {self._path} has no YUYV without padding.")
        return wanted.width, wanted.height

    def _request(self) -> int:
        request = RequestBuffers(count=BUFFERS, type=CAPTURE, memory=MEMORY_MAP)
        fcntl.ioctl(self._file, REQBUFS, request)
        if not request.count:
            raise CameraError(f"The camera {self._path} gives no buffer.")
        return int(request.count)

    def _map(self, index: int) -> mmap.mmap:
        buffer = Buffer(index=index, type=CAPTURE, memory=MEMORY_MAP)
        fcntl.ioctl(self._file, QUERYBUF, buffer)
        mapped = mmap.mmap(self._file, buffer.length, offset=buffer.offset & 0xFFFFFFFF)
        fcntl.ioctl(self._file, QBUF, buffer)
        return mapped

    def _take(self) -> bytes:
        if not select.select([self._file], [], [], FRAME_S)[0]:
            raise CameraError(f"The camera {self._path} gave no frame in {FRAME_S} s.")
        buffer = Buffer(type=CAPTURE, memory=MEMORY_MAP)
        fcntl.ioctl(self._file, DQBUF, buffer)
        data = bytes(self._maps[buffer.index][: buffer.bytesused])
        fcntl.ioctl(self._file, QBUF, buffer)
        return data
