"""Pictures of a folder in the place of a camera, one after the other and again from the start."""

from pathlib import Path

from esp32_agent.port.base import Camera, CameraError
from esp32_agent.port.pictures import picture_shape, rgb_tensor

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
