"""Runs the golden inputs and digests what the model made of them.

The digest binds the outputs to one run, so that a device cannot send it without having run the model in that run, or
having its outputs. File: `OGLD`, then count, input bytes and output bytes as little-endian u32, then for each golden
vector its input and its expected output. The expected outputs are not read here: the service compares.
"""

import hashlib

from esp32_agent.port.base import PortError, Runner, Storage

_MAGIC = b"OGLD"
_HEADER = 16
_MOST = 1024  # golden vectors


def run_golden(runner: Runner, storage: Storage, name: str, run_id: str | None) -> tuple[int, str] | None:
    """How many golden inputs ran, and SHA-256 over the run's id and all outputs; None where no such file is.

    Raises PortError for a file that is damaged or belongs to another model.
    """
    header = storage.read(name, 0, _HEADER)
    if header is None:
        return None
    if len(header) < _HEADER or header[:4] != _MAGIC:
        raise PortError(f"{name} holds no golden inputs.")
    count, inputs, outputs = _u32(header, 4), _u32(header, 8), _u32(header, 12)
    if inputs != runner.input_bytes or outputs != runner.output_bytes or not 0 < count <= _MOST:
        raise PortError(f"{name} holds golden inputs of another model.")
    digest = hashlib.sha256((run_id or "").encode())
    for place in range(count):
        data = storage.read(name, _HEADER + place * (inputs + outputs), inputs)
        if data is None or len(data) < inputs:
            raise PortError(f"{name} ends within golden input {place + 1}.")
        runner.set_input(data)
        runner.invoke()
        digest.update(runner.output())
    return count, digest.digest().hex()


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
