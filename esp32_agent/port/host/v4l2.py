"""A webcam by Video4Linux2, through ioctl alone (linux/videodev2.h, 64-bit layouts)."""

import ctypes
import fcntl
import mmap
import os
import select
from pathlib import Path

from esp32_agent.port.base import Camera, CameraError
from esp32_agent.port.pictures import picture_shape, yuyv_tensor

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
