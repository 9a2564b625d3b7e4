"""The functions of decode.cpp and the structs that they take, field by field as in interface.h."""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from optigpu.ops.build import load_library
from optigpu.ops.decode.cpu.cache import CpuCache
from optigpu.ops.decode.program import Matrix, Norm, Program
from optigpu.ops.operands import named
from optigpu.vocabulary import ReplicateError, UnsupportedError

_FOLDER = Path(__file__).resolve().parent
SOURCES = (
    _FOLDER / "decode.cpp",
    *sorted(_FOLDER.glob("*.h")),
    _FOLDER.parents[1] / "bfloat16.h",
    _FOLDER.parents[1] / "vector_math.h",
)
"""decode.cpp and what it includes."""
_ERRORS: dict[int, type[Exception]] = {1: ValueError, 2: UnsupportedError, 3: ReplicateError}
"""The error for each return code."""
_MESSAGE_BYTES = 512
_NORMS = {"layer": 0, "rms": 1}
_KINDS = {"bf16": 0, "w4": 1, "w8": 2, "w4k": 3, "w3k": 4}
_ACTIVATIONS = {"gelu_tanh": 0, "gelu": 1, "relu": 2, "silu": 3}
_CACHES = {"bf16": 0, "int8": 1, "int4": 2}

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p
ARGUMENTS: dict[str, tuple[type, ...]] = {
    "decoder_create": (_pointer, _int64, _pointer, _int64, _pointer, _pointer, ctypes.c_char_p),
    "decoder_begin": (_pointer, _pointer, ctypes.c_char_p),
    "decoder_run": (_pointer, _pointer, ctypes.c_char_p),
    "decoder_length": (_pointer,),
    "decoder_best_instruction_set": (),
    "decoder_destroy": (_pointer,),
    "decoder_advance": (_pointer, _pointer, ctypes.c_char_p),
    "speculation_create": (_pointer, _pointer, _int64, _int64, _pointer, ctypes.c_char_p),
    "speculation_begin": (_pointer, _pointer, _int64, ctypes.c_char_p),
    "speculation_run": (_pointer, _pointer, ctypes.c_char_p),
    "speculation_destroy": (_pointer,),
}
"""The argument types of the functions optigpu_*. All return an int64, except those that destroy."""


class NormC(ctypes.Structure):
    _fields_ = (("kind", _int64), ("weight", _pointer), ("bias", _pointer), ("epsilon", ctypes.c_double))


class MatrixC(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("kind", "outputs", "inputs", "group")),
        *((name, _pointer) for name in ("numbers", "scale", "bias", "unit", "finer")),
    )


class FinerRowsC(ctypes.Structure):
    _fields_ = (("rows", _pointer), ("matrix", MatrixC))


class BlockC(ctypes.Structure):
    _fields_ = (
        ("first", NormC),
        ("qkv", ctypes.POINTER(MatrixC)),
        ("qkv_count", _int64),
        ("output", MatrixC),
        ("second", NormC),
        ("gate", MatrixC),
        ("up", MatrixC),
        ("down", MatrixC),
        ("scale", ctypes.c_double),
        ("window", _int64),
    )


class ProgramC(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("width", "heads", "kv_heads", "head_size", "inner")),
        *((name, _int64) for name in ("vocabulary", "context", "activation")),
        ("embedding", MatrixC),
        ("positions", MatrixC),
        ("blocks", ctypes.POINTER(BlockC)),
        ("block_count", _int64),
        ("final", NormC),
        ("head", MatrixC),
    )


class CacheC(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("kind", "sequences", "capacity", "page", "pages", "most")),
        *((name, _pointer) for name in ("table", "keys", "values", "key_scales", "value_scales")),
        *((name, _pointer) for name in ("cosines", "sines")),
    )


class RequestC(ctypes.Structure):
    _fields_ = (
        ("tokens", _pointer),
        ("count", _int64),
        ("steps", _int64),
        ("temperature", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("chosen", _pointer),
        ("stride", _int64),
        ("logits", _pointer),
    )


class RowsC(ctypes.Structure):
    _fields_ = (
        ("count", _int64),
        *((name, _pointer) for name in ("tokens", "sequence", "position", "wanted", "chosen", "logits")),
    )


class GuessingC(ctypes.Structure):
    _fields_ = (
        ("text", _pointer),
        *((name, _int64) for name in ("known", "least", "most")),
        ("logits", _pointer),
        *((name, _int64) for name in ("chosen", "passes", "guessed", "right")),
    )


@functools.cache
def decoder_library() -> ctypes.CDLL:
    """The functions optigpu_*. Raises UnsupportedError where they cannot be built or loaded."""
    library = load_library(SOURCES)
    for name, arguments in ARGUMENTS.items():  # without types ctypes cuts results to 32 bits
        function = getattr(library, f"optigpu_{name}")  # library["..."] would give another object each time
        function.argtypes = arguments
        function.restype = None if name.endswith("_destroy") else _int64
    return library


class DecoderCalls:
    """Calls the library's functions, and raises what they report as ValueError, UnsupportedError or ReplicateError."""

    def __init__(self) -> None:
        self._message = ctypes.create_string_buffer(
            _MESSAGE_BYTES
        )  # one for all calls: a token waits for each

    def __call__(self, function: Callable[..., int], *arguments: object) -> None:
        outcome = function(*arguments, self._message)
        if outcome:
            raise _ERRORS[outcome](self._message.value.decode())


class DescribedProgram:
    """A program as the struct `c`, with the memory that it points to besides the program's tensors."""

    def __init__(self, program: Program) -> None:
        for matrix in _without_finer(program):
            if matrix.finer is not None:
                raise ValueError("Only the head and the embedding can have finer rows.")
        self.program = program
        self._qkv = [
            (MatrixC * len(block.qkv))(*(_matrix(matrix) for matrix in block.qkv)) for block in program.blocks
        ]
        blocks = [
            BlockC(
                *(_norm(block.first), qkv, len(block.qkv), _matrix(block.output), _norm(block.second)),
                *(_matrix(block.gate), _matrix(block.up), _matrix(block.down)),
                *(block.scale, block.window or 0),
            )
            for block, qkv in zip(program.blocks, self._qkv, strict=True)
        ]
        self._blocks = (BlockC * len(blocks))(*blocks)
        tables = (program.embedding, program.head)
        self._finer = [
            FinerRowsC(_address(table.finer.rows), _matrix(table.finer.matrix)) if table.finer else None
            for table in tables
        ]
        embedding, head = map(_matrix, tables, self._finer)
        self.c = ProgramC(
            *(program.width, program.heads, program.kv_heads, program.head_size, program.inner),
            *(program.vocabulary, program.context, _ACTIVATIONS[program.activation]),
            *(embedding, _matrix(program.positions)),
            *(self._blocks, len(blocks), _norm(program.final), head),
        )


def described_cache(cache: CpuCache, capacity: int) -> CacheC:
    """The first `capacity` tokens of a cache."""
    cosines, sines = cache.angles or (None, None)
    tensors = (cache.table, cache.keys, cache.values, cache.key_scales, cache.value_scales, cosines, sines)
    return CacheC(
        *(_CACHES[cache.kind], cache.sequences, capacity, cache.page, cache.pages, cache.table.shape[1]),
        *(_address(tensor) for tensor in tensors),
    )


def pinning(threads: int, cpus: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """For each thread its CPU, or -1 where there are too few."""
    chosen = list(cpus[:threads]) if len(cpus) >= threads else [-1] * threads
    return (_int64 * len(chosen))(*chosen)


def _without_finer(program: Program) -> Iterator[Matrix]:
    for block in program.blocks:
        yield from (*block.qkv, block.output, *((block.gate,) if block.gate else ()), block.up, block.down)
    for table in (program.embedding, program.head):
        if table.finer:
            yield table.finer.matrix


def _matrix(matrix: Matrix | None, finer: FinerRowsC | None = None) -> MatrixC:
    """One of no outputs where there is none. `finer` must live as long."""
    if matrix is None:
        return MatrixC()
    return MatrixC(
        *(_KINDS[matrix.kind], matrix.outputs, matrix.inputs, matrix.group),
        *(_address(matrix.numbers), _address(matrix.scale), _address(matrix.bias), _address(matrix.unit)),
        ctypes.addressof(finer) if finer else None,
    )


def _norm(norm: Norm) -> NormC:
    return NormC(_NORMS[norm.kind], _address(norm.weight), _address(norm.bias), norm.epsilon)


def _address(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor. Raises ValueError if the operator would read it wrongly."""
    if tensor is None:
        return None
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"The CPU decoder needs contiguous tensors on the CPU, not {named(tensor)} on {tensor.device}."
        )
    return tensor.data_ptr() or None
