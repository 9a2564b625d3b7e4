"""The functions of decode.cpp and the structs that they take, field by field as in interface.h."""

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from optigpu.ops.build import load_library
from optigpu.ops.decode.cpu import SOURCES
from optigpu.ops.decode.cpu.cache import CpuCache
from optigpu.ops.decode.program import (
    Block,
    HeadNorm,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    block_matrices,
)
from optigpu.ops.operands import named
from optigpu.vocabulary import ReplicateError, UnsupportedError

_ERRORS: dict[int, type[Exception]] = {1: ValueError, 2: UnsupportedError, 3: ReplicateError}
"""The error for each return code."""
_MESSAGE_BYTES = 512
_NORMS = {"layer": 0, "rms": 1}
_KINDS = {"bf16": 0, "w4": 1, "w8": 2, "w4k": 3, "w3k": 4, "w5": 5, "w6": 6}
_ACTIVATIONS = {"gelu_tanh": 0, "gelu": 1, "relu": 2, "silu": 3, "relu2": 4}
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


class HeadNormC(ctypes.Structure):
    _fields_ = (("norm", NormC), ("together", _int64))


class MatrixC(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("kind", "outputs", "inputs", "group")),
        *((name, _pointer) for name in ("numbers", "scale", "bias", "unit", "finer")),
    )


class FinerRowsC(ctypes.Structure):
    _fields_ = (("rows", _pointer), ("matrix", MatrixC))


class ExpertC(ctypes.Structure):
    _fields_ = (("up", ctypes.POINTER(MatrixC)), ("up_count", _int64), ("down", MatrixC))


class MixtureC(ctypes.Structure):
    _fields_ = (
        ("experts", ctypes.POINTER(ExpertC)),
        *((name, _int64) for name in ("count", "shared", "chosen")),
        ("routers", ctypes.POINTER(MatrixC)),
        *((name, _int64) for name in ("router_count", "sigmoid", "normalized", "pairs")),
        *((name, ctypes.c_double) for name in ("scale", "alpha", "limit")),
        ("choice_bias", _pointer),
    )


class BlockC(ctypes.Structure):
    _fields_ = (
        ("first", NormC),
        ("qkv", ctypes.POINTER(MatrixC)),
        ("qkv_count", _int64),
        *((name, HeadNormC) for name in ("query_norm", "key_norm")),
        ("rotary", _int64),
        ("sinks", _pointer),
        ("output", MatrixC),
        *((name, NormC) for name in ("after_attention", "second")),
        *((name, MatrixC) for name in ("gate", "up", "down")),
        ("after_mlp", NormC),
        ("mixture", ctypes.POINTER(MixtureC)),
        ("scale", ctypes.c_double),
        ("window", _int64),
    )


class ProgramC(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("width", "heads", "kv_heads", "head_size", "inner")),
        *((name, _int64) for name in ("vocabulary", "context", "activation", "rotary_size")),
        *((name, _int64) for name in ("neighbours", "by_groups", "parallel")),
        *(
            (name, ctypes.c_double)
            for name in ("embedding_scale", "residual_scale", "score_cap", "logit_cap")
        ),
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
        *((name, _int64) for name in ("tables", "angles")),
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
        self._blocks = (BlockC * len(program.blocks))(*(_block(block) for block in program.blocks))
        tables = (program.embedding, program.head)
        self._finer = [
            FinerRowsC(_address(table.finer.rows), _matrix(table.finer.matrix)) if table.finer else None
            for table in tables
        ]
        embedding, head = map(_matrix, tables, self._finer)
        self.c = ProgramC(
            *(program.width, program.heads, program.kv_heads, program.head_size, program.inner),
            *(program.vocabulary, program.context, _ACTIVATIONS[program.activation], program.rotary_size),
            *(program.neighbours, program.by_groups, program.parallel),
            *(
                program.embedding_scale,
                program.residual_scale,
                program.score_cap or 0,
                program.logit_cap or 0,
            ),
            *(embedding, _matrix(program.positions)),
            *(self._blocks, len(self._blocks), _norm(program.final), head),
        )


def described_cache(cache: CpuCache, capacity: int) -> CacheC:
    """The first `capacity` tokens of a cache."""
    cosines, sines = cache.angles
    tensors = (cache.table, cache.keys, cache.values, cache.key_scales, cache.value_scales, cosines, sines)
    return CacheC(
        *(_CACHES[cache.kind], cache.sequences, capacity, cache.page, cache.pages, cache.table.shape[1]),
        *(_address(tensor) for tensor in tensors),
        *cosines.shape[:2],
    )


def pinning(threads: int, cpus: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """For each thread its CPU, or -1 where there are too few."""
    chosen = list(cpus[:threads]) if len(cpus) >= threads else [-1] * threads
    return (_int64 * len(chosen))(*chosen)


def _without_finer(program: Program) -> Iterator[Matrix]:
    for block in program.blocks:
        yield from block_matrices(block)
    for table in (program.embedding, program.head):
        if table.finer:
            yield table.finer.matrix


def _block(block: Block) -> BlockC:
    """ctypes keeps the arrays that its pointers were made of."""
    dense = block.mlp if isinstance(block.mlp, Mlp) else None
    mixture = block.mlp if isinstance(block.mlp, Mixture) else None
    return BlockC(
        *(_norm(block.first), _matrices(block.qkv), len(block.qkv)),
        *(_head_norm(block.query_norm), _head_norm(block.key_norm)),
        *(-1 if block.rotary is None else block.rotary, _address(block.sinks)),
        *(_matrix(block.output), _norm(block.after_attention), _norm(block.second)),
        *((_matrix(dense.gate), _matrix(dense.up), _matrix(dense.down)) if dense else (MatrixC(),) * 3),
        *(_norm(block.after_mlp), ctypes.pointer(_mixture(mixture)) if mixture else None),
        *(block.scale, block.window or 0),
    )


def _mixture(mixture: Mixture) -> MixtureC:
    experts = [*mixture.experts, *([mixture.shared] if mixture.shared else [])]
    routers = [mixture.router, *([mixture.shared_gate] if mixture.shared_gate else [])]
    described = (ExpertC(_matrices(each.up), len(each.up), _matrix(each.down)) for each in experts)
    return MixtureC(
        *(
            (ExpertC * len(experts))(*described),
            len(mixture.experts),
            mixture.shared is not None,
            mixture.chosen,
        ),
        *(_matrices(routers), len(routers), mixture.score == "sigmoid", mixture.normalized, mixture.pairs),
        *(mixture.scale, *(mixture.clamp or (0, 0)), _address(mixture.choice_bias)),
    )


def _matrices(matrices: Sequence[Matrix]) -> "ctypes.Array[MatrixC]":
    return (MatrixC * len(matrices))(*map(_matrix, matrices))


def _matrix(matrix: Matrix | None, finer: FinerRowsC | None = None) -> MatrixC:
    """One of no outputs where there is none. `finer` must live as long."""
    if matrix is None:
        return MatrixC()
    return MatrixC(
        *(_KINDS[matrix.kind], matrix.outputs, matrix.inputs, matrix.group),
        *(_address(matrix.numbers), _address(matrix.scale), _address(matrix.bias), _address(matrix.unit)),
        ctypes.addressof(finer) if finer else None,
    )


def _head_norm(heads: HeadNorm | None) -> HeadNormC:
    return HeadNormC(_norm(heads.norm), heads.together) if heads else HeadNormC()


def _norm(norm: Norm | None) -> NormC:
    """One without a weight where there is none."""
    if norm is None:
        return NormC()
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
