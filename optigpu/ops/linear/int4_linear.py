"""Linear layers with 4-bit weights in groups and floating-point activations: the arithmetic of `int4_weight_only`.

    weights = quantize_groups(weight, Int4Scheme())        # once
    packed = pack_int4(weights, backend)                   # once, for int4_linear_backend(device, dtype)
    y = int4_linear(x, packed, bias)                       # y = x @ dequantize_groups(weights).T + bias

On a CPU with a compiler this is our C++ operator (int4_linear.cpp); elsewhere torch's own operators or plain torch.
"""

from typing import Literal, NamedTuple

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, sources
from optigpu.ops.four_bits.quantize import dequantize_groups
from optigpu.ops.four_bits.scheme import Int4Weights
from optigpu.ops.layouts import INT4_CUDA_OUTPUTS, INT4_TILE
from optigpu.ops.operands import INT4_ZERO, check_activations, check_bias, filled, named

Int4Backend = Literal[
    "native-avx512-vnni",
    "native-avx512",
    "native-avx2",
    "native-portable",
    "torch-int4pack",
    "torch-dequantize",
]

TILE = INT4_TILE
BLOCK = 8
"""Inputs of an output that are stored together there; kBlockInputs."""
INSTRUCTION_SETS: dict[Int4Backend, int] = {
    "native-portable": 1,
    "native-avx2": 2,
    "native-avx512": 3,
    "native-avx512-vnni": 4,
}
"""The operator's numbers; the enumeration InstructionSet in int4_linear.cpp."""
PACKED_OUTPUTS = {"cpu": 16, "cuda": INT4_CUDA_OUTPUTS}
"""torch's int4 operators need a multiple of this many outputs."""
INNER_TILES = (8, 4, 2)
"""Possible multiples of 16 inputs that torch's operator on CUDA stores together: the largest divisor is used."""
OLDEST_CAPABILITY = (8, 0)
"""The first GPUs that torch's operator on CUDA is built for."""
_SOURCES = sources(__file__, "int4_linear.cpp", "int4_linear_kernel.h", "../bfloat16.h")
_NATIVE = NativeOperators(
    _SOURCES,
    "optigpu_best_int4_instruction_set",
    {"int4_linear": lambda x, *others, **_: x.new_empty((*x.shape[:-1], others[4]))},  # the number of outputs
    INSTRUCTION_SETS,
)
native_reason = _NATIVE.reason


class PackedInt4(NamedTuple):
    """4-bit weights in a backend's layout; `outputs` does not count the padding.

    native: numbers uint8 [tiles, inner / 8, 4 * TILE], scale and offset bfloat16 [tiles, groups, TILE]
    torch-int4pack: numbers in torch's own layout, scale bfloat16 [groups, outputs, 2] with the offsets, offset None
    torch-dequantize: numbers uint8 [outputs, inner / 2], scale and offset bfloat16 [outputs, groups]
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    outputs: int


def int4_linear_backend(device: torch.device | str, dtype: torch.dtype) -> Int4Backend:
    """The backend of `pack_int4` and `int4_linear` for weights of `dtype` on `device`. Builds the operator when it can.

    On CUDA torch's operator computes in bfloat16, so only such weights go to it.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return "torch-int4pack" if native_reason() is not None else _NATIVE.best
    fits = device.type == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None
    if fits and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY:
        return "torch-int4pack"
    return "torch-dequantize"


def pack_int4(weights: Int4Weights, backend: Int4Backend) -> PackedInt4:
    """Lays out 4-bit weights for `int4_linear` on their device.

    For the C++ operator the outputs are filled up to a multiple of TILE with zeros, and 8 inputs of each of 32 outputs
    are 128 bytes.
    """
    if backend == "torch-dequantize":
        return PackedInt4(to_halves(weights.q), weights.scale, weights.offset, weights.q.shape[0])
    return _for_torch(weights) if backend == "torch-int4pack" else _for_native(weights)


def int4_rows(packed: PackedInt4, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight matrix, float32 [..., inner]; ids: int64 [...], outputs.

    Raises ValueError for the layout of torch's own operators, which torch alone can read.
    """
    return dequantize_groups(_read_rows(packed, ids))


def unpack_int4(packed: PackedInt4) -> Int4Weights:
    """What `pack_int4` packed. Raises ValueError for the layout of torch's own operators."""
    return _read_rows(packed, torch.arange(packed.outputs, device=packed.numbers.device))


def _read_rows(packed: PackedInt4, ids: torch.Tensor) -> Int4Weights:
    if packed.numbers.dim() == 3:
        tile, place = ids // TILE, ids % TILE
        blocks = packed.numbers.unflatten(2, (TILE, -1))[tile, :, place]
        q = torch.stack([blocks & 15, blocks >> 4], dim=-2).flatten(-3)
        offset = None if packed.offset is None else packed.offset[tile, :, place]
        return Int4Weights(q, packed.scale[tile, :, place], offset)
    if packed.scale.dim() == 2:
        offset = None if packed.offset is None else packed.offset[ids]
        return Int4Weights(from_halves(packed.numbers[ids]), packed.scale[ids], offset)
    raise ValueError("int4_rows cannot read weights in the layout of torch's own int4 operators.")


def from_halves(halves: torch.Tensor) -> torch.Tensor:
    """The numbers of `to_halves`, uint8 [..., inner]."""
    return torch.stack([halves >> 4, halves & 15], dim=-1).flatten(-2)


def to_halves(q: torch.Tensor) -> torch.Tensor:
    """Two numbers in a byte, the first in the upper half: uint8 [outputs, inner / 2]."""
    return torch.bitwise_or(q[:, ::2] << 4, q[:, 1::2])


def int4_product_dtype(packed: PackedInt4) -> str | None:
    """What `int4_linear` multiplies: int8 digits of the activations, bfloat16, or (None) numbers of x's own dtype."""
    if packed.numbers.dim() == 3:
        return "int8"
    return None if packed.scale.dim() == 2 else "bfloat16"


def int4_linear(
    x: torch.Tensor,
    packed: PackedInt4,
    bias: torch.Tensor | None = None,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """y = x @ weight.T + bias with dequantized 4-bit weights. Has no gradient.

    x: float32, bfloat16 or float16 [..., inner]; packed: what `pack_int4` returned; bias: float32 [outputs]. Returns
    [..., outputs] in x's type. `instruction_set`: a path of the C++ operator, from INSTRUCTION_SETS. Traces into one
    graph under torch.compile(fullgraph=True). The C++ operator rounds each activation to 2**-23 of the largest of its
    group of inputs; torch's own operators round x and y to bfloat16. Raises ValueError for shapes and types that do not
    fit.
    """
    _check(x, packed, bias)
    if packed.numbers.dim() == 3:
        known = x.float() if x.dtype == torch.float16 else x  # the C++ operator knows the other two types
        y: torch.Tensor = torch.ops.optigpu.int4_linear(
            known, packed.numbers, packed.scale, packed.offset, bias, packed.outputs, instruction_set
        )
        return y.to(x.dtype)
    if packed.scale.dim() == 2:
        every = torch.arange(packed.outputs, device=x.device)
        y = torch.nn.functional.linear(x, int4_rows(packed, every).to(x.dtype))
    else:
        multiply = torch._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else torch._weight_int4pack_mm
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        sums = multiply(rows, packed.numbers, x.shape[-1] // packed.scale.shape[0], packed.scale)
        y = sums[:, : packed.outputs].to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else (y + bias).to(x.dtype)


def _for_native(weights: Int4Weights) -> PackedInt4:
    outputs, inner = weights.q.shape
    q = filled(weights.q, TILE, INT4_ZERO).view(-1, TILE, inner // BLOCK, 2, BLOCK // 2)
    numbers = (q[..., 0, :] | q[..., 1, :] << 4).transpose(1, 2).flatten(2).contiguous()

    def tiled(scales: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = filled(scales, TILE).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()
        return found

    offset = None if weights.offset is None else tiled(weights.offset)
    return PackedInt4(numbers, tiled(weights.scale), offset, outputs)


def _for_torch(weights: Int4Weights) -> PackedInt4:
    device = weights.q.device.type
    unit, (outputs, inner) = PACKED_OUTPUTS[device], weights.q.shape
    q = filled(weights.q, unit, INT4_ZERO)
    offset = torch.zeros_like(weights.scale) if weights.offset is None else weights.offset
    scale = filled(torch.stack([weights.scale, offset], dim=-1), unit).transpose(0, 1).contiguous()
    if device == "cpu":
        numbers = torch._convert_weight_to_int4pack_for_cpu(q.int(), 1)
    else:
        inner_tiles = next(tiles for tiles in INNER_TILES if inner % (16 * tiles) == 0)
        numbers = torch._convert_weight_to_int4pack(to_halves(q), inner_tiles)  # CUDA's packs halves as we do
    return PackedInt4(numbers, scale, None, outputs)


def _check(x: torch.Tensor, packed: PackedInt4, bias: torch.Tensor | None) -> None:
    check_activations(x, "int4_linear")
    numbers, scale = packed.numbers, packed.scale
    inner = {
        3: BLOCK * numbers.shape[1],
        4: 32 * numbers.shape[1] * numbers.shape[-1],
        2: 2 * numbers.shape[-1],
    }
    if inner.get(numbers.dim()) != x.shape[-1]:
        raise ValueError(f"The weights take {inner.get(numbers.dim())} inputs; x has {x.shape[-1]}.")
    if scale.dtype != torch.bfloat16 or (packed.offset is not None and packed.offset.dtype != torch.bfloat16):
        raise ValueError(f"int4_linear needs bfloat16 scales and offsets, not {named(scale)}.")
    check_bias(bias, packed.outputs, "int4_linear")
