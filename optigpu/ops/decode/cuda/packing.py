"""The layout of matrices for the decoder's CUDA operators: each output's inputs in order, in 16-byte loads.

    matrix = pack_for_cuda(weight, bias, "w4", 32)
    unpack_from_cuda(matrix)                              # the unpacked weights

32 inputs are a unit:

    w4      numbers int32 [outputs, units, 4]: byte j of a unit holds input j in its lower and input 16 + j in its upper
            half, as signed 4-bit numbers; a weight is number * scale * unit
    w4k     numbers int32 [outputs, units, 4]: word j of a unit holds input 4 * j + i from bit 4 * i and input
            16 + 4 * j + i from bit 16 + 4 * i, so that half a word is what selects four bytes of a table; a weight is
            the number's value in four_bits/scheme.py * scale * unit
    w3k     numbers int32 [outputs, 3, units]: the units' first words, then their second and their third ones, as those
            of w4k; the fourth word's numbers have their three bits where those of the others have no fourth one
    w5      numbers int32 [outputs, 5 * units]: the units' lower bits as those of w4, then each one's fifth bits:
            byte i has that of input 4 * j + i at bit j; a weight is as one of w4
    w6      numbers int32 [outputs, 6 * units]: the same with two upper bits, from bit 2 * j on, in words of the units'
            first 16 inputs and then in words of their second ones
    w8      numbers int32 [outputs, 2, units, 4]: the units' first 16 inputs, then their second 16, a byte for each; a
            weight is number * scale * unit
    bf16    numbers bfloat16 [outputs, inputs]; no scale

Scales are int8 [outputs, groups] and units bfloat16 [outputs], the same as cpu/packing.py's. Everything stays on the
weight's device.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from optigpu.ops.decode.cpu.packing import TABLES, UPPER, check, quantize_eight, quantize_few
from optigpu.ops.decode.program import UNEVEN, Matrix, WeightKind
from optigpu.ops.four_bits.compensated import Compensation
from optigpu.ops.four_bits.grid import Uneven
from optigpu.ops.four_bits.quantize import scale_units
from optigpu.ops.layouts import DECODE_BITS
from optigpu.ops.operands import INT8_LARGEST, is_finite

UNIT = 32
HALF = 16
LOWEST = 0x11111111
"""The lowest bit of each four bits of a word."""


def pack_for_cuda(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: WeightKind,
    group: int,
    known: Compensation | None = None,
) -> Matrix:
    """A linear layer for the CUDA operators. weight: floating point [outputs, inputs]; bias: [outputs] or None.

    `group` inputs of an output share a scale; bf16 has none and ignores it. `known` is what `quantize_few` makes errors
    of 3 to 6 bits up with. Raises ValueError when the weight is no finite floating-point matrix, the groups do not
    divide its inputs, or the bias does not fit.
    """
    check(weight, bias, kind, group)
    if not is_finite(weight):
        raise ValueError("pack_for_cuda needs finite weights: this matrix holds NaN or infinity.")
    outputs, inputs = weight.shape
    weight = weight.detach()
    added = None if bias is None else bias.detach().float().contiguous()
    if kind == "bf16":
        return Matrix("bf16", outputs, inputs, 0, weight.to(torch.bfloat16).contiguous(), None, added)
    if kind == "w8":
        unit = scale_units(weight, INT8_LARGEST)
        q, scale = quantize_eight(weight, group, unit)
        words = q.unflatten(1, (-1, 2, HALF)).transpose(1, 2).contiguous().view(torch.int32)
        return Matrix("w8", outputs, inputs, group, words, scale, added, unit)
    found, unit = quantize_few(weight, kind, group, known)
    if kind in UNEVEN:
        words = _words_of_uneven(found.q, kind)
    else:
        signed = found.q ^ 1 << DECODE_BITS[kind] - 1  # as two's complement, of so many bits
        first, second = (signed & 15).unflatten(1, (-1, 2, HALF)).unbind(2)
        words = (first | second << 4).contiguous().view(torch.int32)
        if kind in UPPER:
            words = torch.cat([words.flatten(1), _upper_words(signed >> 4, UPPER[kind])], dim=1)
    return Matrix(kind, outputs, inputs, group, words, found.scale, added, unit)


def numbers_shape(kind: WeightKind, outputs: int, inputs: int) -> tuple[int, ...]:
    """Of a matrix's numbers."""
    units = inputs // UNIT
    return {
        "w3k": (outputs, 3, units),
        "w4": (outputs, units, 4),
        "w4k": (outputs, units, 4),
        "w5": (outputs, 5 * units),
        "w6": (outputs, 6 * units),
        "w8": (outputs, 2, units, 4),
        "bf16": (outputs, inputs),
    }[kind]


def unpack_from_cuda(matrix: Matrix) -> torch.Tensor:
    """The unpacked weights of a matrix, float32 [outputs, inputs]."""
    found = _unpacked(matrix)
    if matrix.finer is not None:
        found[matrix.finer.rows] += _unpacked(matrix.finer.matrix)
    return found


def _unpacked(matrix: Matrix) -> torch.Tensor:
    if matrix.scale is None or matrix.unit is None:
        return matrix.numbers.float()
    if matrix.kind in UNEVEN:
        grid = Uneven(TABLES[matrix.kind], matrix.numbers.device)
        numbers = _uneven_numbers(matrix).reshape(*matrix.scale.shape, matrix.group)
        values = grid.values(numbers) + grid.moved(matrix.scale).unsqueeze(2)
    elif matrix.kind in UPPER:
        values = _numbers_with_upper_bits(matrix).float()
    else:
        # Of w4 [outputs, units, HALF], of w8 [outputs, 2, units, HALF].
        bytes_ = matrix.numbers.view(torch.int8)
        four = matrix.kind == "w4"
        halves = torch.stack([bytes_ << 4 >> 4, bytes_ >> 4], dim=2) if four else bytes_.transpose(1, 2)
        values = halves.float()
    q = values.reshape(matrix.outputs, matrix.inputs // matrix.group, matrix.group)
    scale = matrix.scale * matrix.unit.float().unsqueeze(1)
    return (q * scale.unsqueeze(2)).flatten(1)


def rows_from_cuda(table: Matrix, rows: torch.Tensor) -> torch.Tensor:
    """Unpacked rows of a table, float32 [..., inputs]. rows: int64 [...]."""
    some = rows.flatten()
    scale, unit = (None if part is None else part[some] for part in (table.scale, table.unit))
    found = _unpacked(replace(table, outputs=len(some), numbers=table.numbers[some], scale=scale, unit=unit))
    if table.finer is not None:
        places = places_of_finer(table)[some]
        found[places >= 0] += rows_from_cuda(table.finer.matrix, places[places >= 0])
    return found.view(*rows.shape, table.inputs)


def places_of_finer(table: Matrix) -> torch.Tensor:
    """For each row its place among the finer ones, -1 for others; int64 [outputs]."""
    places = torch.full((table.outputs,), -1, device=table.numbers.device)
    if table.finer is not None:
        places[table.finer.rows] = torch.arange(table.finer.rows.numel(), device=places.device)
    return places


def joined(matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The same outputs in fewer matrices: neighbours of one kind and group become one, which one product reads."""
    groups = groupby(matrices, key=lambda matrix: (matrix.kind, matrix.group))
    return tuple(_join(list(group)) for _, group in groups)


def stacked(matrices: Sequence[Matrix]) -> list[tuple[Matrix, torch.Tensor]]:
    """Matrices of one shape, those of one kind and group joined, and each one's place in them, int32, -1 for none."""
    kinds, found = [(matrix.kind, matrix.group) for matrix in matrices], []
    for kind in dict.fromkeys(kinds):
        some = [index for index, each in enumerate(kinds) if each == kind]
        places = [some.index(index) if index in some else -1 for index in range(len(kinds))]
        device = matrices[0].numbers.device
        whole = _join([matrices[index] for index in some])
        found.append((whole, torch.tensor(places, dtype=torch.int32, device=device)))
    return found


def rows_from(matrix: Matrix, rows: slice, outputs: int) -> Matrix:
    """A matrix of so many outputs that has some rows of another one's tensors, or more than its own."""
    parts = {name: getattr(matrix, name) for name in ("numbers", "scale", "unit", "bias")}
    tensors = {name: part[rows] for name, part in parts.items() if part is not None}
    return replace(matrix, outputs=outputs, **tensors)


def _join(parts: Sequence[Matrix]) -> Matrix:
    first, bias, device = parts[0], None, parts[0].numbers.device
    if len(parts) == 1:
        return first
    if any(part.bias is not None for part in parts):
        biases = (part.bias for part in parts)
        nothing = (torch.zeros(part.outputs, device=device) for part in parts)
        bias = torch.cat([no if own is None else own for own, no in zip(biases, nothing, strict=True)])
    names, outputs = ("numbers", "scale", "unit"), sum(part.outputs for part in parts)
    numbers, scales, units = ([getattr(part, name) for part in parts] for name in names)
    scale, unit = (None if each[0] is None else _together(each) for each in (scales, units))
    return replace(first, outputs=outputs, numbers=_together(numbers), scale=scale, unit=unit, bias=bias)


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of the rows of all, which is no copy where they follow one another in memory."""
    first, places = parts[0], [part.data_ptr() for part in parts]
    ends = [place + part.nbytes for place, part in zip(places, parts, strict=True)]
    if places[1:] == ends[:-1] and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return torch.cat(tuple(parts))


def _upper_words(upper: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [outputs, count * units] of so many bits of each number, uint8 [outputs, inputs]."""
    parts = upper.unflatten(1, (-1, count, 8 // count, 4)) << _upper_shifts(upper)[::count]
    bytes_ = parts.sum(dim=3, dtype=torch.uint8).transpose(1, 2).contiguous()  # [outputs, count, units, 4]
    found: torch.Tensor = bytes_.view(torch.int32).flatten(1)
    return found


def _numbers_with_upper_bits(matrix: Matrix) -> torch.Tensor:
    """int8 [outputs, units, UNIT]"""
    count, units = UPPER[matrix.kind], matrix.inputs // UNIT
    bytes_ = matrix.numbers.contiguous().view(torch.uint8)
    lower = bytes_[:, : HALF * units].unflatten(1, (units, HALF))
    upper = bytes_[:, HALF * units :].unflatten(1, (count, units, 1, 4)).transpose(1, 2)
    upper = (upper >> _upper_shifts(upper)[::count]).flatten(2)  # [outputs, units, UNIT]
    whole = torch.cat([lower & 15, lower >> 4], dim=2) | upper << 4
    found: torch.Tensor = (whole << 4 - count).view(torch.int8) >> 4 - count
    return found


def _upper_shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device).unsqueeze(1)


def _words_of_uneven(q: torch.Tensor, kind: WeightKind) -> torch.Tensor:
    """int32 of `numbers_shape` of numbers from 0, uint8 [outputs, inputs]."""
    fours = q.unflatten(1, (-1, 2, 4, 4)).transpose(2, 3).flatten(3)  # [outputs, units, words, 8]
    low, high = fours.unflatten(3, (4, 2)).unbind(4)
    words: torch.Tensor = (low | high << 4).contiguous().view(torch.int32).squeeze(3)
    if kind == "w3k":
        fourth = words[..., 3]
        parts = [words[..., bit] | (fourth >> bit & LOWEST) << 3 for bit in range(3)]
        words = torch.stack(parts, dim=1)
    return words


def _uneven_numbers(matrix: Matrix) -> torch.Tensor:
    """The other way: int32 [outputs, units, 2, 4, 4], in the order of the inputs."""
    words = matrix.numbers
    if matrix.kind == "w3k":
        one, two, three = words.unbind(1)
        fourth = one >> 3 & LOWEST | (two >> 3 & LOWEST) << 1 | (three >> 3 & LOWEST) << 2
        words = torch.stack([one, two, three, fourth], dim=2)
    mask = 7 if matrix.kind == "w3k" else 15
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    numbers: torch.Tensor = (words.unsqueeze(3) >> shifts & mask).unflatten(3, (2, 4)).transpose(2, 3)
    return numbers
