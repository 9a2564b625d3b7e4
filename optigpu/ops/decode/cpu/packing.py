"""The layout of matrices for the decoder's CPU operator: quantized offline, in blocks of 16 outputs.

    matrix = pack(weight, bias, "w4", 32)        # once
    unpack(matrix)                               # the unpacked weights

A block holds for a few inputs what all of its 16 outputs need of them, so that one stream of memory feeds 16 sums and
no sum runs across a register:

    w4      numbers uint8 [blocks, inputs / 8, 64]: byte 4 * row + i of a chunk j holds q of input 8 * j + i in its
            lower half and of input 8 * j + 4 + i in its upper half; a weight is (q - 8) * scale * unit
    w4k     numbers as those of w4; a weight is their value in four_bits/scheme.py, moved where the scale is odd, *
            scale * unit
    w3k     numbers uint8 [blocks, inputs / 32, 192], 64 bytes for the lower two bits of the first 16 inputs of a chunk,
            64 for those of the others, and 64 for the third bits: byte 4 * row + i has the lower bits of input
            4 * j + i from bit 2 * (j % 4), and its third bit at THIRD_BITS[j]; a weight is as one of w4k
    w5, w6  numbers uint8 [blocks, inputs / 32, 320 or 384]: the lower 4 bits of 32 inputs as those of w4, then 64 bytes
            for the fifth bits of all or 128 for the two upper bits of 16 and 16: byte 4 * row + i has those of input
            4 * j + i of these from bit j or 2 * j; a weight is (q - 16 or 32) * scale * unit
    w8      numbers uint8 [blocks, inputs / 4, 64]: byte 4 * row + i of a chunk j is q + 128 of input 4 * j + i; a
            weight is q * scale * unit
    bf16    numbers bfloat16 [blocks, inputs / 2, 16, 2]: row, input; no scale

Scales are int8 [blocks, groups, 16], units bfloat16 [blocks, 16] and biases float32 [blocks * 16]. What fills up the
last block is zeros. A scale of 8 bits where others have 16 is a twentieth of what a step with 4-bit weights reads.
"""

from collections.abc import Iterator
from typing import cast

import torch

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.program import GROUPS, UNEVEN, Matrix, WeightKind
from optigpu.ops.four_bits.compensated import Compensation, compensated_groups
from optigpu.ops.four_bits.grid import Uneven
from optigpu.ops.four_bits.quantize import quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import EIGHT, FURTHEST, REACH, SIXTEEN, Int4Scheme, Int4Weights
from optigpu.ops.layouts import DECODE_BITS, DECODE_TILE
from optigpu.ops.operands import INT4_ZERO, INT8_LARGEST, filled, is_finite, named

ROWS = DECODE_TILE
"""Outputs of a block."""
LANE = 4
"""Inputs of an output that meet four activations in one instruction."""
MIDDLE = 128
"""The number that is added to 8-bit numbers, so that they are stored without a sign."""
AT_ONCE = 2**20
"""Weights that are packed at once: a few times as many bytes stay in the caches."""
COMPENSATED_AT_ONCE = 2**24
"""The same with compensation, where each thread takes some outputs after the other."""
NOTHING = 2.0**-100
"""The unit of an output whose weights are all 0, which is no uneven value."""
TABLES: dict[WeightKind, tuple[int, ...]] = {"w3k": EIGHT, "w4k": SIXTEEN}
THIRD_BITS = (0, 1, 4, 5, 2, 3, 6, 7)
"""Of the inputs 4 * j to 4 * j + 3. Those of j and j + 2 are four bits apart, as their lower bits are."""
_THIRD_SHIFTS = torch.tensor(THIRD_BITS, dtype=torch.uint8).unsqueeze(1)
UPPER: dict[WeightKind, int] = {"w5": 1, "w6": 2}
"""Bits of a number above its lower four."""
_PLANES = 8 * LANE
_CHUNK = {
    "w3k": _PLANES,
    "w4": 2 * LANE,
    "w4k": 2 * LANE,
    "w5": _PLANES,
    "w6": _PLANES,
    "w8": LANE,
    "bf16": 2,
}
"""Inputs of an output that are stored together."""


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: WeightKind,
    group: int,
    arena: Arena | None = None,
    known: Compensation | None = None,
) -> Matrix:
    """A linear layer for the CPU operator. weight: floating point [outputs, inputs]; bias: [outputs] or None.

    `group` inputs of an output share a scale; bf16 has none and ignores it. Numbers and scales are taken from `arena`
    where there is one. `known`, the compensation of the layer's inputs, is for 3 to 6 bits. Raises ValueError if the
    weight is not a finite floating-point matrix on the CPU, the groups do not divide its inputs, or the bias does not
    fit.
    """
    check(weight, bias, kind, group)
    if weight.device.type != "cpu":
        raise ValueError(f"pack needs weights on the CPU, not on {weight.device}.")
    if kind == "bf16" and weight.shape[1] % 2:
        raise ValueError(f"bf16 weights need an even number of inputs, not {weight.shape[1]}.")
    outputs, inputs = weight.shape
    blocks = -(-outputs // ROWS)

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype) if arena is None else arena.take(shape, dtype)

    numbers = room(numbers_shape(kind, blocks, inputs), torch.bfloat16 if kind == "bf16" else torch.uint8)
    scale = None if kind == "bf16" else room((blocks, inputs // group, ROWS), torch.int8)
    unit = None if kind == "bf16" else room((blocks, ROWS), torch.bfloat16)
    block = 0
    for rows in _strips(weight, AT_ONCE if known is None else COMPENSATED_AT_ONCE):
        q, some_scales, some_units = _quantized(rows, kind, group, known)
        these = slice(block, block + -(-rows.shape[0] // ROWS))
        numbers[these] = _interleaved(q, kind)
        if scale is not None and unit is not None:
            scale[these] = filled(some_scales, ROWS).unflatten(0, (-1, ROWS)).transpose(1, 2)
            unit[these] = filled(some_units, ROWS).unflatten(0, (-1, ROWS))
        block = these.stop
    padded = None if bias is None else filled(bias.detach().float(), ROWS).contiguous()
    return Matrix(kind, outputs, inputs, 0 if kind == "bf16" else group, numbers, scale, padded, unit)


def unpack(matrix: Matrix) -> torch.Tensor:
    """The unpacked weights of a matrix, float32 [outputs, inputs]."""
    found = torch.empty(matrix.outputs, matrix.inputs)
    step = max(1, AT_ONCE // matrix.inputs // ROWS)
    for start in range(0, matrix.numbers.shape[0], step):
        rows = _unpacked(matrix, slice(start, start + step))
        found[start * ROWS : (start + step) * ROWS] = rows[: matrix.outputs - start * ROWS]
    if matrix.finer is not None:
        found[matrix.finer.rows] += unpack(matrix.finer.matrix)
    return found


def squared_errors(weight: torch.Tensor, kind: WeightKind, group: int) -> torch.Tensor:
    """The squared errors of a packed matrix's weights, summed over each group, float32 [outputs, inputs / group].

    On the weight's device. Raises ValueError as `pack` does.
    """
    check(weight, None, kind, group)
    parts = [(_rounded(rows, kind, group) - rows).square() for rows in _strips(weight)]
    return torch.cat([part.unflatten(1, (-1, group)).sum(dim=2) for part in parts])


def quantize_eight(weight: torch.Tensor, group: int, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers int8 [outputs, inputs], from -127 to 127, and scales int8 [outputs, groups], multiples of `unit`.

    weight: finite, floating point [outputs, inputs]; unit: bfloat16 [outputs], of `scale_units`.
    """
    groups, units = weight.float().unflatten(1, (-1, group)), unit.float()[:, None, None]
    # Upwards, so that the largest weight of a group stays within 127, but for what bfloat16 has rounded the unit down.
    scale = (groups.abs().amax(dim=2, keepdim=True) / (INT8_LARGEST * units)).ceil_().clamp_(1, INT8_LARGEST)
    q = (groups / (scale * units)).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return q.char().flatten(1), scale.char().squeeze(2)


def _strips(weight: torch.Tensor, at_once: int = AT_ONCE) -> Iterator[torch.Tensor]:
    """Whole blocks of outputs, float32 and contiguous, about `at_once` weights at a time.

    Raises ValueError when a weight is NaN or infinite.
    """
    for rows in weight.detach().split(max(1, at_once // weight.shape[1] // ROWS) * ROWS):
        if not is_finite(rows):
            raise ValueError("pack needs finite weights: this matrix holds NaN or infinity.")
        yield rows.float().contiguous()


def _rounded(rows: torch.Tensor, kind: WeightKind, group: int) -> torch.Tensor:
    if kind == "bf16":
        return rows.bfloat16().float()
    q, scale, unit = _quantized(rows, kind, group)
    found = _values(q.unflatten(1, (-1, group)), scale, kind)
    return (found * (scale * unit.float().unsqueeze(1)).unsqueeze(2)).flatten(1)


def _values(q: torch.Tensor, scale: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """What numbers [..., groups, group] stand for in units of their scales [..., groups], float32."""
    if kind not in UNEVEN:
        return q.float() - _ZEROS[kind]
    grid = Uneven(TABLES[kind], q.device)
    return grid.values(q) + grid.moved(scale).unsqueeze(-1)


def quantize_few(
    weight: torch.Tensor, kind: WeightKind, group: int, known: Compensation | None = None
) -> tuple[Int4Weights, torch.Tensor]:
    """Numbers of 3 to 6 bits and scales of a weight, floating point [outputs, inputs], and its outputs' units.

    Scales, int8 [outputs, groups], are multiples of the units, bfloat16 [outputs]. With the `compensation` of a layer's
    inputs errors make up for each other. Raises ValueError as the functions of four_bits do.
    """
    table = TABLES.get(kind, ())
    # `check` has seen that the group is one of the scheme's.
    scheme = Int4Scheme(group, symmetric=True, solver="hqq", table=table, whole_bits=DECODE_BITS[kind])
    unit = scale_units(weight, int(-FURTHEST / REACH) if table else -scheme.least)
    if table:
        unit = unit.masked_fill(weight.abs().amax(dim=1) == 0, NOTHING)
    if known is None:
        return quantize_groups(weight, scheme, unit), unit
    return compensated_groups(weight, known, scheme, unit), unit


def _quantized(
    rows: torch.Tensor, kind: WeightKind, group: int, known: Compensation | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [outputs, inputs]; scales [outputs, groups] and units [outputs], not for bf16."""
    if kind == "bf16":
        return rows.bfloat16(), rows[:, :0], rows[:0, 0]
    if kind == "w8":
        unit = scale_units(rows, INT8_LARGEST)
        q, scale = quantize_eight(rows, group, unit)
        return (q.short() + MIDDLE).byte(), scale, unit
    weights, unit = quantize_few(rows, kind, group, known)
    return weights.q, weights.scale, unit


def _interleaved(q: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """[outputs, inputs] in the operator's order, the last block padded with zeros."""
    chunks = filled(q, ROWS, _ZEROS[kind]).unflatten(1, (-1, _CHUNK[kind])).unflatten(0, (-1, ROWS))
    if kind == "w3k":
        return _three_bits(chunks)
    if kind in UPPER:
        return _with_upper_bits(chunks, UPPER[kind])
    if kind in ("w4", "w4k"):
        lower, upper = chunks[..., :LANE], chunks[..., LANE:]
        chunks = lower | upper << 4
    chunks = chunks.transpose(1, 2)  # [blocks, chunks, ROWS, ...]
    return cast(torch.Tensor, chunks if kind == "bf16" else chunks.flatten(2))


def _three_bits(chunks: torch.Tensor) -> torch.Tensor:
    """Numbers uint8 [blocks, ROWS, chunks, 32] as bytes [blocks, chunks, 192]."""
    fours = chunks.unflatten(3, (8, LANE))  # 8 times 4 inputs that meet 4 activations
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    lower = ((fours & 3) << shifts % 4 * 2).unflatten(3, (2, 4)).sum(dim=4, dtype=torch.uint8)
    third = ((fours >> 2) << _THIRD_SHIFTS).sum(dim=3, keepdim=True, dtype=torch.uint8)
    found: torch.Tensor = torch.cat([lower, third], dim=3).permute(0, 2, 3, 1, 4).flatten(2)
    return found


def _of_three_bits(numbers: torch.Tensor) -> torch.Tensor:
    """The other way: numbers [blocks, ROWS, inputs]."""
    planes = numbers.unflatten(2, (3, ROWS, LANE)).permute(0, 3, 1, 2, 4)  # [blocks, ROWS, chunks, 3, LANE]
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    lower = planes[..., :2, :].repeat_interleave(4, dim=3) >> shifts % 4 * 2 & 3
    found: torch.Tensor = (lower | (planes[..., 2:, :] >> _THIRD_SHIFTS & 1) << 2).flatten(2)
    return found


def _with_upper_bits(chunks: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers uint8 [blocks, ROWS, chunks, 32] as bytes [blocks, chunks, 256 + 64 * count]."""
    pairs = chunks.unflatten(3, (4, 2, LANE))  # 8 inputs of a register, in its lower and upper halves
    lower = pairs[..., 0, :] & 15 | pairs[..., 1, :] << 4
    upper = (chunks >> 4).unflatten(3, (count, 8 // count, LANE)) << _upper_shifts(count)
    upper = upper.sum(dim=4, dtype=torch.uint8)
    found: torch.Tensor = torch.cat([lower, upper], dim=3).permute(0, 2, 3, 1, 4).flatten(2)
    return found


def _of_upper_bits(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """The other way: numbers [blocks, ROWS, inputs]."""
    planes = numbers.unflatten(2, (4 + count, ROWS, LANE)).permute(0, 3, 1, 2, 4)
    lower = torch.stack([planes[..., :4, :] & 15, planes[..., :4, :] >> 4], dim=4).flatten(3)
    upper = planes[..., 4:, :].unsqueeze(4) >> _upper_shifts(count) & 2**count - 1
    found: torch.Tensor = (lower | upper.flatten(3) << 4).flatten(2)
    return found


def _upper_shifts(count: int) -> torch.Tensor:
    return torch.arange(0, 8, count, dtype=torch.uint8).unsqueeze(1)


_ZEROS = {"w3k": 0, "w4": INT4_ZERO, "w4k": 0, "w5": 16, "w6": 32, "w8": MIDDLE, "bf16": 0}
"""Numbers of what fills up the last block, whose scales are zeros; uneven values have no 0."""


def _unpacked(matrix: Matrix, blocks: slice) -> torch.Tensor:
    numbers = matrix.numbers[blocks]
    if matrix.scale is None or matrix.unit is None:
        return numbers.transpose(1, 2).float().reshape(-1, matrix.inputs)
    kind, multiple = matrix.kind, matrix.scale[blocks].transpose(1, 2).flatten(0, 1)  # [outputs, groups]
    if kind == "w3k":
        unpacked = _of_three_bits(numbers)
    elif kind in UPPER:
        unpacked = _of_upper_bits(numbers, UPPER[kind])
    else:
        unpacked = numbers.unflatten(2, (ROWS, LANE)).transpose(1, 2)  # [blocks, ROWS, chunks, LANE]
        if kind != "w8":
            unpacked = torch.stack([unpacked & 15, unpacked >> 4], dim=3)
    groups = unpacked.reshape(*multiple.shape, matrix.group)
    scale = multiple * matrix.unit[blocks].float().flatten().unsqueeze(1)
    return (_values(groups, multiple, kind) * scale.unsqueeze(2)).flatten(1)


def numbers_shape(kind: WeightKind, blocks: int, inputs: int) -> tuple[int, ...]:
    """Of a matrix's packed numbers: bfloat16 ones for that kind, else bytes."""
    if kind == "bf16":
        return (blocks, inputs // 2, ROWS, 2)
    return (blocks, inputs // _CHUNK[kind], _CHUNK[kind] * DECODE_BITS[kind] // 8 * ROWS)


def check(weight: torch.Tensor, bias: torch.Tensor | None, kind: WeightKind, group: int) -> None:
    """Raises ValueError unless a weight is a matrix whose inputs the groups divide, and the bias fits."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"pack needs a floating-point matrix, not {named(weight)}.")
    outputs, inputs = weight.shape
    if kind != "bf16" and group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))}, not {group}.")
    if not inputs or (kind != "bf16" and inputs % group):
        raise ValueError(f"Groups of {group} do not divide {inputs} inputs.")
    if bias is not None and (bias.shape != (outputs,) or not is_finite(bias)):
        raise ValueError(f"pack needs one finite bias for each of {outputs} outputs.")
