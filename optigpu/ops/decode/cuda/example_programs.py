"""Programs without memory, of the shapes of known models: a kernel of a whole step is compiled for them without a GPU.

Imported only where a GPU is used, because it loads Triton.
"""

from dataclasses import dataclass

import torch

from optigpu.ops.decode.cuda.triton_linear import matrix_without_memory, norm_without_memory
from optigpu.ops.decode.program import Block, CacheKind, FinerRows, Matrix, Norm, Program, WeightKind
from optigpu.ops.kernel import without_memory

CONTEXT, BLOCKS, FINER_ROWS = 1024, 2, 1376


@dataclass(frozen=True)
class Shape:
    """A `gated` one is like Llama, another one like GPT-2."""

    gated: bool
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int


SHAPES = {
    "GPT-2": Shape(False, 768, 12, 12, 64, 3072, 50257),
    "Llama 3.2 1B": Shape(True, 2048, 32, 8, 64, 8192, 128256),
    "Llama 3.1 8B": Shape(True, 4096, 32, 8, 128, 14336, 128256),
}


@dataclass(frozen=True)
class Scene:
    """`spilled_bytes`: those of Example."""

    model: str
    kind: WeightKind
    kv: CacheKind = "bf16"
    spilled_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}, {self.kind}, {self.kv} cache"

    @property
    def program(self) -> Program:
        return program_without_memory(SHAPES[self.model], self.kind)


SCENES = (
    Scene("GPT-2", "w4", "int8"),
    Scene("Llama 3.2 1B", "bf16"),
    Scene("Llama 3.2 1B", "w8"),
    Scene("Llama 3.2 1B", "w4k"),
    Scene("Llama 3.1 8B", "w3k", spilled_bytes=44),
    Scene("Llama 3.1 8B", "w4", spilled_bytes=4),
)


def program_without_memory(shape: Shape, kind: WeightKind) -> Program:
    """Of two blocks; how many there are is no constant of a kernel."""
    head = matrix_without_memory(kind, shape.vocabulary, shape.width)
    if not shape.gated:
        rows = without_memory(FINER_ROWS, dtype=torch.int64)
        head = Matrix(
            *(kind, head.outputs, head.inputs, head.group, head.numbers, head.scale, None, head.unit),
            finer=FinerRows(rows, matrix_without_memory(kind, FINER_ROWS, shape.width)),
        )
    half = shape.head_size // 2
    return Program(
        *(shape.width, shape.heads, shape.kv_heads, shape.head_size, shape.inner, shape.vocabulary, CONTEXT),
        activation="silu" if shape.gated else "gelu_tanh",
        embedding=head,
        positions=None if shape.gated else matrix_without_memory("w8", CONTEXT, shape.width),
        rotary=(lambda length: (without_memory(length, half),) * 2) if shape.gated else None,
        blocks=(_block(shape, kind),) * BLOCKS,
        final=_norm(shape),
        head=head,
    )


def _block(shape: Shape, kind: WeightKind) -> Block:
    biased = not shape.gated
    heads = shape.heads + 2 * shape.kv_heads
    return Block(
        first=_norm(shape),
        qkv=(matrix_without_memory(kind, heads * shape.head_size, shape.width, biased),),
        output=matrix_without_memory(kind, shape.width, shape.heads * shape.head_size, biased),
        second=_norm(shape),
        gate=matrix_without_memory(kind, shape.inner, shape.width) if shape.gated else None,
        up=matrix_without_memory(kind, shape.inner, shape.width, biased),
        down=matrix_without_memory(kind, shape.width, shape.inner, biased),
        scale=shape.head_size**-0.5,
        window=None,
    )


def _norm(shape: Shape) -> Norm:
    return norm_without_memory("rms" if shape.gated else "layer", shape.width)
