"""Files in a folder, each change flushed to the disk before the call returns."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from esp32_agent.port.base import PortError, Storage, StorageFullError

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
