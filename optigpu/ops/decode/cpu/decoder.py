"""A decoder on a CPU: one call of the C++ operator (decode.cpp) runs whole steps of decoding, with threads of its own.

decoder = CpuDecoder(program, kv="bf16", threads=2)
decoder.begin(sequences=1, capacity=160)
logits = decoder.extend(prompt)                       # the prompt, int64 [1, 32]
tokens = decoder.decode(logits.argmax(-1, keepdim=True), steps=127)

Between two tokens as little as possible is done: a step pushes everything else out of the caches, so that an operation
of torch that takes a microsecond takes twenty there.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from optigpu.ops.build import load_library
from optigpu.ops.decode.calls import check_steps, decoded
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Norm, Program, Sampling
from optigpu.ops.naming import named
from optigpu.vocabulary import ReplicateError, UnsupportedError

CpuInstructions = Literal["best", "portable", "avx2", "avx512_vnni"]
INSTRUCTION_SETS: dict[CpuInstructions, int] = {"best": 0, "portable": 1, "avx2": 2, "avx512_vnni": 3}
"""What the operator can be told to run; a CPU that lacks it is refused."""
KEY_BLOCK = 16
"""Tokens whose keys lie together: a cache has room for a multiple of them."""

_FOLDER = Path(__file__).resolve().parent
_SOURCES = (
    _FOLDER / "decode.cpp",
    *sorted(_FOLDER.glob("*.h")),
    _FOLDER.parents[1] / "bfloat16.h",
    _FOLDER.parents[1] / "vector_math.h",
)
_MESSAGE_BYTES = 512
_ERRORS: dict[int, type[Exception]] = {1: ValueError, 2: UnsupportedError, 3: ReplicateError}
"""By what the operator returns."""
_NORMS = {"layer": 0, "rms": 1}
_KINDS = {"bf16": 0, "w4": 1, "w8": 2}
_ACTIVATIONS = {"gelu_tanh": 0, "gelu": 1, "relu": 2, "silu": 3}
_CACHES = {"bf16": 0, "int8": 1}


class CpuDecoder:
    """Runs a program whose matrices packing.py packed. Results do not depend on the number of threads.

    Raises UnsupportedError where the operator cannot be built or memory does not suffice, and ValueError for a program
    that does not fit together, a number of threads below 1, and an instruction set that this CPU lacks.
    """

    def __init__(
        self,
        program: Program,
        kv: CacheKind = "bf16",
        threads: int = 1,
        instruction_set: CpuInstructions = "best",
        cpus: Sequence[int] = (),
    ) -> None:
        """`cpus` are what the threads are pinned to, the first of them during calls alone; too few pin none."""
        self._library = _library()
        self._program = program
        self._kv = kv
        self._cache: _Cache | None = None
        self._logits: torch.Tensor | None = None
        self._decoded: torch.Tensor | None = None
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        kept: list[Any] = [program]
        described = _program(program, kept)
        handle = ctypes.c_void_p()
        self._call(
            self._library.optigpu_decoder_create,
            *(ctypes.byref(described), threads, _pinning(threads, cpus), INSTRUCTION_SETS[instruction_set]),
            ctypes.byref(handle),
        )
        self._handle = handle
        weakref.finalize(self, _destroy, self._library, handle, (described, kept))

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens; one that is large enough is used again.

        Raises UnsupportedError when there is not enough memory for it.
        """
        if sequences < 1 or capacity < 1:
            raise ValueError(f"A cache of {capacity} tokens of {sequences} sequences has room for nothing.")
        cache = self._cache
        if cache is None or cache.sequences != sequences or cache.stored < capacity:
            self._cache = None  # before there is another
            cache = _Cache(self._program, self._kv, sequences, capacity)
        described = cache.described(capacity)
        self._call(self._library.optigpu_decoder_begin, self._handle, ctypes.byref(described))
        self._cache = cache
        self._logits = self._decoded = None

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""
        return int(self._library.optigpu_decoder_length(self._handle))

    @property
    def logits(self) -> torch.Tensor:
        """Of the last step, float32 [sequences, vocabulary]. What `decode` gave is written over by the next `decode`.

        Raises ValueError before there was any.
        """
        if self._logits is None:
            raise ValueError("There are no logits before a token was given: call extend or decode first.")
        return self._logits

    @property
    def cache_bytes(self) -> int:
        """Of keys, values and their scales, of all sequences."""
        return self._cache.stored_bytes if self._cache else 0

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens, int64 [sequences, count], and returns the last's logits, [sequences, vocabulary].

        Raises ValueError for ids that the model does not have, and ReplicateError for a position beyond the cache and
        when numbers are not finite any more.
        """
        request = self._request(tokens, Sampling())
        logits = torch.empty(tokens.shape[0], self._program.vocabulary)
        request.logits = logits.data_ptr()
        self._run(request)
        self._logits = logits
        return logits

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The next `steps` tokens, int64 [sequences, steps], in one call. tokens: int64 [sequences, 1], the last ones.

        They are not in the cache yet, and the last that is chosen is not afterwards. Raises what `extend` does.
        """
        return decoded(self, tokens, steps, sampling)

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """As `decode`, `at_once` tokens of each sequence in a call; gives after each call how many it chose.

        `chosen`, contiguous int64 [sequences, steps], is filled when the last one has ended.
        """
        request, steps = self._request(tokens, sampling or Sampling()), chosen.shape[1]
        check_steps(tokens, steps, at_once)
        if chosen.dtype != torch.int64 or chosen.shape[0] != tokens.shape[0] or not chosen.is_contiguous():
            raise ValueError(f"decode fills int64 [{tokens.shape[0]}, steps], not {named(chosen)}.")
        if self._decoded is None:
            self._decoded = torch.empty(tokens.shape[0], self._program.vocabulary)
        request.logits, request.stride, request.chosen = self._decoded.data_ptr(), steps, chosen.data_ptr()
        for left in range(steps, 0, -at_once):
            request.steps = min(at_once, left)
            self._run(request)
            self._logits = self._decoded
            yield request.steps
            request.tokens = None  # goes on from those that it chose
            request.chosen += request.steps * 8

    def _request(self, tokens: torch.Tensor, sampling: Sampling) -> Any:
        """It keeps the tokens, and has no room yet for what comes out."""
        if self._cache is None:
            raise ValueError("The decoder has no cache yet: call begin first.")
        sequences = self._cache.sequences
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != sequences:
            raise ValueError(f"The decoder takes int64 [{sequences}, count] tokens, not {named(tokens)}.")
        request = _RequestC(
            count=tokens.shape[1], temperature=sampling.temperature, seed=sampling.seed % 2**64
        )
        request.kept = tokens.contiguous()
        request.tokens = request.kept.data_ptr()
        return request

    def _run(self, request: Any) -> None:
        self._call(self._library.optigpu_decoder_run, self._handle, ctypes.byref(request))

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        outcome = function(*arguments, self._message)
        if outcome:
            raise _ERRORS[outcome](self._message.value.decode())


class _Cache:
    """The memory of keys and values, and the angles of their positions."""

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        self.sequences = sequences
        self.stored = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self._kind = kv
        heads = len(program.blocks) * sequences * program.kv_heads
        padded = -(-program.head_size // 16) * 16
        dtype = torch.bfloat16 if kv == "bf16" else torch.int8
        try:
            self._keys = torch.empty(heads, self.stored * program.head_size, dtype=dtype)
            self._values = torch.empty(heads, self.stored * padded, dtype=dtype)
            scales = heads if kv == "int8" else 0
            self._key_scales = torch.empty(scales, self.stored)
            self._value_scales = torch.empty(scales, self.stored)
            self._angles = program.rotary(self.stored) if program.rotary else ()
        except RuntimeError as error:
            needed = heads * self.stored * (program.head_size + padded) * dtype.itemsize
            raise UnsupportedError(
                f"There is not enough memory for a cache of {capacity} tokens of {sequences} sequences "
                f"({needed / 2**30:.1f} GiB); ask for fewer."
            ) from error

    @property
    def stored_bytes(self) -> int:
        tensors = (self._keys, self._values, self._key_scales, self._value_scales)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def described(self, capacity: int) -> "_CacheC":
        cosines, sines = self._angles or (None, None)
        return _CacheC(
            *(_CACHES[self._kind], self.sequences, capacity, self.stored),
            *(
                _pointer(tensor)
                for tensor in (self._keys, self._values, self._key_scales, self._value_scales)
            ),
            *(_pointer(cosines), _pointer(sines)),
        )


def _structure(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("_Structure", (ctypes.Structure,), {"_fields_": list(fields)})


def _numbers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


# The structs of interface.h and the Request of engine.h, field by field.
_NormC: Any = _structure(*_numbers("kind"), *_pointers("weight", "bias"), ("epsilon", ctypes.c_double))
_MatrixC: Any = _structure(
    *_numbers("kind", "outputs", "inputs", "group"), *_pointers("numbers", "scale", "bias", "unit")
)
_BlockC: Any = _structure(
    ("first", _NormC),
    ("qkv", ctypes.POINTER(_MatrixC)),
    *_numbers("qkv_count"),
    ("output", _MatrixC),
    ("second", _NormC),
    *((name, _MatrixC) for name in ("gate", "up", "down")),
    ("scale", ctypes.c_double),
    *_numbers("window"),
)
_ProgramC: Any = _structure(
    *_numbers("width", "heads", "kv_heads", "head_size", "inner", "vocabulary", "context", "activation"),
    *_pointers("embedding", "positions"),
    ("blocks", ctypes.POINTER(_BlockC)),
    *_numbers("block_count"),
    ("final", _NormC),
    ("head", _MatrixC),
)
_CacheC: Any = _structure(
    *_numbers("kind", "sequences", "capacity", "stored"),
    *_pointers("keys", "values", "key_scales", "value_scales", "cosines", "sines"),
)
_RequestC: Any = _structure(
    *_pointers("tokens"),
    *_numbers("count", "steps"),
    ("temperature", ctypes.c_float),
    ("seed", ctypes.c_uint64),
    *_pointers("chosen"),
    *_numbers("stride"),
    *_pointers("logits"),
)


def _program(program: Program, kept: list[Any]) -> Any:
    """The struct; what it points to beside the program's own tensors goes to `kept`."""
    blocks = (_BlockC * len(program.blocks))(*(_block(block, kept) for block in program.blocks))
    kept.append(blocks)
    return _ProgramC(
        *(program.width, program.heads, program.kv_heads, program.head_size, program.inner),
        *(program.vocabulary, program.context, _ACTIVATIONS[program.activation]),
        *(_pointer(program.embedding), _pointer(program.positions)),
        *(blocks, len(program.blocks), _norm(program.final), _matrix(program.head)),
    )


def _block(block: Block, kept: list[Any]) -> Any:
    qkv = (_MatrixC * len(block.qkv))(*(_matrix(matrix) for matrix in block.qkv))
    kept.append(qkv)
    return _BlockC(
        *(_norm(block.first), qkv, len(block.qkv), _matrix(block.output), _norm(block.second)),
        *(_MatrixC() if block.gate is None else _matrix(block.gate), _matrix(block.up), _matrix(block.down)),
        *(block.scale, block.window or 0),
    )


def _matrix(matrix: Matrix) -> Any:
    return _MatrixC(
        *(_KINDS[matrix.kind], matrix.outputs, matrix.inputs, matrix.group),
        *(_pointer(matrix.numbers), _pointer(matrix.scale), _pointer(matrix.bias), _pointer(matrix.unit)),
    )


def _norm(norm: Norm) -> Any:
    return _NormC(_NORMS[norm.kind], _pointer(norm.weight), _pointer(norm.bias), norm.epsilon)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    """Raises ValueError for a tensor that the operator would read wrongly."""
    if tensor is None:
        return None
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"The CPU decoder reads contiguous tensors of the host, not {named(tensor)}.")
    return tensor.data_ptr() or None


def _pinning(threads: int, cpus: Sequence[int]) -> Any:
    """For each thread its CPU, or -1."""
    chosen = list(cpus[:threads]) if len(cpus) >= threads else [-1] * threads
    return (ctypes.c_int64 * len(chosen))(*chosen)


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library(_SOURCES)
    library.optigpu_decoder_length.restype = ctypes.c_int64
    for name in ("create", "begin", "run", "best_instruction_set"):
        library[f"optigpu_decoder_{name}"].restype = ctypes.c_int64
    library.optigpu_decoder_create.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_char_p),
    ]
    return library


def best_instruction_set() -> CpuInstructions:
    """The fastest that this CPU has. Raises UnsupportedError where the operator cannot be built."""
    best = _library().optigpu_decoder_best_instruction_set()
    return next(name for name, number in INSTRUCTION_SETS.items() if number == best)


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, kept: Any) -> None:
    """Ends the threads; `kept` is what they read until now."""
    library.optigpu_decoder_destroy(handle)
    del kept
