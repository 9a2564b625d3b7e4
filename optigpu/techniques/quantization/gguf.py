from dataclasses import replace
from functools import partial
from typing import Literal, cast, get_args

from optigpu.models.described import Matrix, Part, StoredWeights
from optigpu.ops.layouts import GgufBlock, gguf_bytes
from optigpu.techniques.base import EngineOptions, Expected, GgufType, OnCpuEngine, Phase, Technique, Trial
from optigpu.vocabulary import DeviceKind, UnsupportedError

_ALIKE: tuple[GgufType, ...] = ("F16", "BF16", "Q8_0")
"""Types that every matrix of a file has."""


class Gguf(OnCpuEngine, Technique):
    """Runs the model from a GGUF file whose matrices have that type; a float16 key-value cache comes with it.

    Vectors stay in float32, and llama.cpp gives some matrices more bits than the name says: a tied embedding is Q6_K in
    a file of 4 bits, unless `pure` asks for one type of all matrices. Types of 3 bits and fewer whose names begin with
    IQ, and Q2_K_S, are written with an importance matrix: the mean squares of what enters each matrix, over a text that
    the model itself draws; all others without. Only ik_llama_cpp has IQ2_K to IQ6_K, the KS, KSS and KT types and those
    with interleaved rows (R4, R8).
    """

    phase = Phase.QUANTIZATION
    backends = ("llama_cpp", "ik_llama_cpp")
    later = ("pure",)
    summary = "llama.cpp's and ik_llama.cpp's weights of 1 to 16 bits, from a GGUF file written for it"
    citation = "Gerganov et al., llama.cpp, 2023, github.com/ggml-org/llama.cpp"
    expected = (
        Expected(
            "measured here",
            "GPT-2 decoded on two Zen 4 cores that others used as well: 240.8 tokens/s in Q4_0, 168.6 in Q8_0 and "
            "109.3 in F16, beside 25.5 in eager fp32",
            "results/README.md",
        ),
    )
    error_bound = 0.5
    trials = (Trial(), Trial({"type": "Q8_0"}, error_bound=0.1), Trial({"pure": True}))

    name: Literal["gguf"] = "gguf"
    type: GgufType = "Q4_0"
    pure: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.type}"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights=self.type, everywhere=self.pure or None)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """Matrices in llama.cpp's mixture for the type, all else in float32.

        Raises UnsupportedError for a type whose mixture or whose block is not known here.
        """
        matrices = tuple(_packed(matrix, self, weights) for matrix in weights.matrices)
        return weights.but(matrices=matrices, other_bytes=weights.other_bytes * 4 // weights.width)


def _packed(matrix: Matrix, gguf: Gguf, weights: StoredWeights) -> Matrix:
    """The matrix's bytes; the mean where llama.cpp gives more bits to some of the blocks."""
    size = partial(gguf_bytes, matrix.outputs, matrix.inner)
    bias = 4 * matrix.outputs if matrix.bias_bytes else 0
    if matrix.part is Part.POSITIONS:
        return replace(matrix, bytes=size("F32"))
    if matrix.part is Part.HEAD and weights.tied:
        return matrix
    is_head = matrix.part is Part.HEAD or (matrix.part is Part.EMBEDDING and weights.tied)
    if gguf.pure or gguf.type in _ALIKE:
        return replace(matrix, bytes=size(_block(gguf.type)), bias_bytes=bias)
    if gguf.type not in ("Q4_0", "Q4_K_M"):
        raise UnsupportedError(
            f"Which matrices get more bits in a file of {gguf.type} is known when it is written; ask for pure, or for "
            "Q4_0 or Q4_K_M."
        )
    if is_head:
        return replace(matrix, bytes=size("Q6_K"), bias_bytes=bias)
    if gguf.type == "Q4_0":
        return replace(matrix, bytes=size("Q4_0"), bias_bytes=bias)
    if matrix.name in ("qkv", "qkv.v", "down"):
        # llama.cpp's use_more_bits: the first and the last eighth of the blocks, and every third between them.
        first, last = matrix.count // 8, 7 * matrix.count // 8
        more = sum(
            index < first or index >= last or (index - first) % 3 == 2 for index in range(matrix.count)
        )
        total = more * size("Q6_K") + (matrix.count - more) * size("Q4_K")
        return replace(matrix, bytes=total // matrix.count, bias_bytes=bias)
    return replace(matrix, bytes=size("Q4_K"), bias_bytes=bias)


def _block(kind: GgufType) -> GgufBlock:
    """The type's block; the names with S, M and L are mixtures of one."""
    name = kind.removesuffix("_S").removesuffix("_M").removesuffix("_L") if "_K_" in kind else kind
    if name not in get_args(GgufBlock):
        raise UnsupportedError(f"How many bytes {kind} takes is known when a file of it is written.")
    return cast(GgufBlock, name)
