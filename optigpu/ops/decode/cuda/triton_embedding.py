"""The first kernel of a decode step, in Triton: the residual of the tokens from their embeddings and positions.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda.state import State
from optigpu.ops.decode.cuda.triton_linear import matrix_arguments, matrix_without_memory
from optigpu.ops.decode.cuda.triton_products import UNIT, word_of
from optigpu.ops.decode.program import FEW_BITS, FinerRows, Matrix
from optigpu.ops.four_bits.scheme import EIGHT, MOVED, SIXTEEN
from optigpu.ops.launch import Example, KernelCall, LaunchTarget, without_memory

EMBEDDED = 1024
"""Numbers of a token's embedding for each program."""
SIXTEEN_LOWER, SIXTEEN_UPPER, EIGHT_WHOLE = word_of(SIXTEEN[:8]), word_of(SIXTEEN[8:]), word_of(EIGHT)
"""The values of w4k and of w3k, eight bytes in a word."""
SIXTEEN_MOVE, EIGHT_MOVE = tl.constexpr(MOVED[16]), tl.constexpr(MOVED[8])


def embed_call(
    state: State,
    embedding: Matrix,
    finer_places: torch.Tensor,
    positions: Matrix | None,
    x: torch.Tensor,
    factor: float = 1.0,
) -> KernelCall:
    """x, float32 [sequences, width], is the row `tokens` of embedding, times a factor, and `position` of positions.

    finer_places: those of `places_of_finer`.
    """
    rows, width = x.shape
    finer = embedding.finer.matrix if embedding.finer else embedding
    added = positions or embedding
    constants = {
        "KIND": embedding.kind,
        "GROUP": embedding.group,
        "FINER": embedding.finer is not None,
        "POSITIONS": "none" if positions is None else positions.kind,
        "POSITIONS_GROUP": added.group,
        "INPUTS": width,
        "BLOCK": EMBEDDED,
    }
    tensors = (
        *(state.tokens, state.position, *_table_arguments(embedding, x)),
        *(finer_places, *_table_arguments(finer, x), *_table_arguments(added, x), x),
    )
    return KernelCall(_embed, (rows, triton.cdiv(width, EMBEDDED)), (*tensors, factor), constants)


def examples(target: LaunchTarget) -> Iterator[Example]:  # noqa: ARG001 - a block is a program on every GPU
    """The embeddings of an 8B model and of GPT-2."""
    rows = FinerRows(without_memory(1376, dtype=torch.int64), matrix_without_memory("w4", 1376, 768))
    embedding = replace(matrix_without_memory("w4", 50257, 768), finer=rows)
    places = without_memory(50257, dtype=torch.int64)
    x, positions = without_memory(1, 768), matrix_without_memory("w8", 1024, 768)
    state = State.empty(1, 1024, x.device)
    yield Example("w4 with positions", embed_call(state, embedding, places, positions, x))
    embedding, x = matrix_without_memory("bf16", 128256, 4096), without_memory(1, 4096)
    yield Example("bf16", embed_call(state, embedding, places, None, x))
    for kind in FEW_BITS:
        embedding, x = matrix_without_memory(kind, 50257, 768), without_memory(1, 768)
        yield Example(kind, embed_call(state, embedding, places, None, x))


def _table_arguments(table: Matrix, instead: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers, byte by byte but for uneven values and bfloat16, scales and units."""
    numbers, scale, unit, _ = matrix_arguments(table, instead)
    return (numbers.view(torch.int8) if table.kind in ("w4", "w5", "w6", "w8") else numbers), scale, unit


@triton.jit
def _embed(
    tokens,
    position,
    numbers,
    scale,
    unit,
    finer_places,
    finer_numbers,
    finer_scale,
    finer_unit,
    positions_numbers,
    positions_scale,
    positions_unit,
    x,
    factor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    FINER: tl.constexpr,
    POSITIONS: tl.constexpr,
    POSITIONS_GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    value = _part_of_row(numbers, scale, unit, token, column, KIND, GROUP, INPUTS)
    if FINER:
        place = tl.load(finer_places + token)
        if place >= 0:
            value += _part_of_row(finer_numbers, finer_scale, finer_unit, place, column, KIND, GROUP, INPUTS)
    value *= factor
    if POSITIONS != "none":
        at = tl.load(position + row).to(tl.int64)
        value += _part_of_row(
            positions_numbers,
            positions_scale,
            positions_unit,
            at,
            column,
            POSITIONS,
            POSITIONS_GROUP,
            INPUTS,
        )
    tl.store(x + row * INPUTS + column, value, mask=column < INPUTS)


@triton.jit
def _part_of_row(
    numbers, scale, unit, row, column, KIND: tl.constexpr, GROUP: tl.constexpr, INPUTS: tl.constexpr
):
    """Some columns of a table's row, float32; the layout of its numbers is in packing.py."""
    inside = column < INPUTS
    if KIND == "bf16":
        value = tl.load(numbers + row * INPUTS + column, mask=inside, other=0.0).to(tl.float32)
    else:
        half = column % UNIT // (UNIT // 2)
        byte = column // UNIT * (UNIT // 2) + column % (UNIT // 2)
        if KIND == "w4k" or KIND == "w3k":
            number = _uneven_part(numbers, row, column, inside, KIND, INPUTS)
        elif KIND == "w4":
            both = tl.load(numbers + row * (INPUTS // 2) + byte, mask=inside, other=0).to(tl.int32)
            number = tl.where(half == 0, both << 28 >> 28, both >> 4)
        elif KIND == "w5" or KIND == "w6":
            UPPER: tl.constexpr = 2 if KIND == "w6" else 1
            at = numbers + row * (INPUTS // 8 * (4 + UPPER))
            both = tl.load(at + byte, mask=inside, other=0).to(tl.int32)
            word, bit = column // UNIT, column % (UNIT // 2) // 4 * UPPER
            if KIND == "w6":
                word += half * (INPUTS // UNIT)
            else:
                bit += half * 4
            upper = tl.load(at + INPUTS // 2 + word * 4 + column % 4, mask=inside, other=0).to(tl.int32)
            number = (upper >> bit << 4 | both >> half * 4 & 15) << (28 - UPPER) >> (28 - UPPER)
        else:
            byte += half * (INPUTS // 2)
            number = tl.load(numbers + row * INPUTS + byte, mask=inside, other=0).to(tl.int32)
        group = row * (INPUTS // GROUP) + column // GROUP
        multiple = tl.load(scale + group, mask=inside, other=0).to(tl.int32)
        if KIND == "w4k":
            number += (multiple & 1) * SIXTEEN_MOVE
        elif KIND == "w3k":
            number += (multiple & 1) * EIGHT_MOVE
        step = multiple.to(tl.float32) * tl.load(unit + row).to(tl.float32)
        value = number.to(tl.float32) * step
    return value


@triton.jit
def _uneven_part(numbers, row, column, inside, KIND: tl.constexpr, INPUTS: tl.constexpr):
    """The values of some columns of a row of w4k or w3k in units of their scales, int32."""
    UNITS: tl.constexpr = INPUTS // UNIT
    unit, word = column // UNIT, column % (UNIT // 2) // 4
    shift = column % UNIT // (UNIT // 2) * 16 + column % 4 * 4
    if KIND == "w4k":
        number = tl.load(numbers + row * (4 * UNITS) + unit * 4 + word, mask=inside, other=0) >> shift & 15
        table = tl.where(number < 8, SIXTEEN_LOWER, SIXTEEN_UPPER)
    else:
        place = numbers + row * (3 * UNITS) + unit
        one = tl.load(place, mask=inside, other=0) >> shift
        two = tl.load(place + UNITS, mask=inside, other=0) >> shift
        three = tl.load(place + 2 * UNITS, mask=inside, other=0) >> shift
        fourth = one >> 3 & 1 | two >> 2 & 2 | three >> 1 & 4
        number = tl.where(word == 0, one, tl.where(word == 1, two, tl.where(word == 2, three, fourth)))
        table = tl.full(column.shape, EIGHT_WHOLE, tl.int64)
    return (table >> (number & 7) * 8 << 56 >> 56).to(tl.int32)
