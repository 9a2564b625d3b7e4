"""Digests and beginnings of files, read in small pieces: a board's heap may be smaller than a model."""

import binascii
import hashlib
import os

from esp32_agent.port.base import RunnerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import _Hash as Hash

PIECE_BYTES = 1024
GOLDEN_HEADER_BYTES = 16  # "OGLD", count, input bytes, output bytes
CODE = (".py", ".mpy")
FOLDER_BIT = 0x4000  # of a file's mode


def sha256(path: str) -> str:
    """64 hex digits. Raises OSError."""
    digest = hashlib.sha256()
    _feed(digest, path)
    return _hex(digest)


def model_sha256(path: str) -> str:
    """The digest of a model's file. Raises RunnerError if it is missing, or is not a TFLite model."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(8)
        digest = sha256(path)
    except OSError as error:
        raise RunnerError(f"The model {path} cannot be read: {error}") from None
    if beginning[4:8] != b"TFL3":
        raise RunnerError(f"The file {path} is not a TFLite model.")
    return digest


def code_sha256(folder: str, system: str) -> str:
    """The digest of the agent's own files below `folder`, in the order of their names, and of the system's version."""
    digest = hashlib.sha256(system.encode())
    for name in sorted(_code_files(folder, "")):
        digest.update(name.encode())
        _feed(digest, f"{folder}/{name}")
    return _hex(digest)


def golden_input(path: str, input_bytes: int) -> bytes:
    """The first input of a golden file. Raises RunnerError if the file is missing, broken, or for another input."""
    try:
        with open(path, "rb") as file:
            header = file.read(GOLDEN_HEADER_BYTES)
            data = file.read(input_bytes)
    except OSError as error:
        raise RunnerError(f"The golden inputs {path} cannot be read: {error}") from None
    if len(header) < GOLDEN_HEADER_BYTES or header[:4] != b"OGLD":
        raise RunnerError(f"The file {path} has no golden inputs.")
    given = int.from_bytes(header[8:12], "little")
    if given != input_bytes or len(data) != input_bytes:
        raise RunnerError(f"The golden inputs {path} have {given} bytes each; the model takes {input_bytes}.")
    return data


def _code_files(folder: str, prefix: str) -> list[str]:
    found = []
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        if os.stat(path)[0] & 0xF000 == FOLDER_BIT:
            if name != "__pycache__":
                found.extend(_code_files(path, f"{prefix}{name}/"))
        elif name.endswith(CODE):
            found.append(prefix + name)
    return found


def _feed(digest: "Hash", path: str) -> None:
    with open(path, "rb") as file:
        while True:
            piece = file.read(PIECE_BYTES)
            if not piece:
                return
            digest.update(piece)


def _hex(digest: "Hash") -> str:
    return binascii.hexlify(digest.digest()).decode()
