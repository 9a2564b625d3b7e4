"""GGUF files of this project's models, written and quantized once and kept: a large one takes minutes."""

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import llama_cpp

from optigpu.backends.llama_cpp import gguf_file, gguf_tensors
from optigpu.backends.llama_cpp.model import print_errors_only
from optigpu.models.bundled import BUNDLED
from optigpu.models.reference import ModelReference, parse_reference, preset_of
from optigpu.vocabulary import UnsupportedError

TYPES = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
"""What llama.cpp calls the kinds of weights that are compared."""


def kept(folder: Path, model: str, weights: str, seed: int, threads: int) -> Path:
    """The GGUF file of a model reference with weights of that kind; written into `folder` if it is not there.

    A preset's random weights are drawn from `seed`, as the engine draws them. Raises UnsupportedError for a model that
    cannot be written or quantized.
    """
    reference = parse_reference(model)
    stem = f"{reference.kind}-{reference.name}-{_digest(reference, seed)}"
    folder.mkdir(parents=True, exist_ok=True)
    plain, target = folder / f"{stem}-F16.gguf", folder / f"{stem}-{weights}.gguf"
    if target.exists():
        return target
    if not plain.exists():
        _make(plain, lambda path: _write(path, reference, seed))
    if target != plain:
        _make(target, lambda path: quantize(plain, path, weights, threads))
    return target


def _write(path: Path, reference: ModelReference, seed: int) -> None:
    from optigpu.models.loading.load import load_model

    gguf_file.write(load_model(reference, device="cpu", dtype="float32", seed=seed), path)


def quantize(plain: Path, path: Path, weights: str, threads: int) -> None:
    """Writes the F16 file `plain` to `path` as llama.cpp quantizes it without an importance matrix.

    Raises UnsupportedError when it cannot.
    """
    print_errors_only()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[weights]
    parameters.nthread = threads
    names = str(plain).encode(), str(path).encode()
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise UnsupportedError(f"llama.cpp could not quantize {plain.name} to {weights}.")


def _make(target: Path, write: Callable[[Path], None]) -> None:
    """A file that is there is whole: it gets its name when it is."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        path = Path(folder) / target.name
        write(path)
        os.replace(path, target)


def _digest(reference: ModelReference, seed: int) -> str:
    """Changes with whatever the file's content depends on: weights, the writer, and the libraries' versions."""
    preset = preset_of(reference)
    if preset is None and reference.kind != "bundled":
        raise UnsupportedError(f"{reference} is not written as GGUF here; name a preset or a bundled model.")
    described = {
        "preset": preset and [preset.model_type, preset.config, seed],
        "versions": [version(name) for name in ("torch", "transformers", "gguf", "llama-cpp-python")],
    }
    files = [Path(gguf_file.__file__), Path(gguf_tensors.__file__)]
    if preset is None:
        files.append(BUNDLED[reference.name] / "model.safetensors")
    found = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()[:12]
