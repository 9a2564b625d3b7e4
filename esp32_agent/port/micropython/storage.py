"""Files in a folder of MicroPython's file system: littlefs on the board, the host's under the unix port."""

import os

from esp32_agent.port.base import PortError, Storage, StorageFullError

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
