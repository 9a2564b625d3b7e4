"""The parts of a decode step's matrix products, in Triton: norm, quantization, a tile of weights, products.

Activations are float32 [ROWS, INPUTS], and a tile is TILE outputs of a matrix with all of their inputs, filled up to
PADDED, a power of two. A tile is loaded once for all rows. The layout of the weights is in packing.py.
"""

import triton
import triton.language as tl

from optigpu.ops.four_bits.scheme import EIGHT, MOVED, SIXTEEN

UNIT = tl.constexpr(32)
"""Inputs whose 4-bit numbers are one 16-byte load."""
HIGH_HALVES = tl.constexpr(-0x0F0F0F10)
"""0xF0F0F0F0: the upper four bits of each byte of a word."""
UPPER_TWO, UPPER_ONE = tl.constexpr(-0x3F3F3F40), tl.constexpr(-0x7F7F7F80)
"""0xC0C0C0C0 and 0x80808080: the upper bits of each byte of a word."""
LOWER_THREE = tl.constexpr(0x77777777)
"""The lower three bits of each four bits of a word."""
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23, where float32 has no fractions: what is added is rounded half to even, into the last byte."""
SMALLEST_ACTIVATION = tl.constexpr(1e-36)
"""Groups with no larger activation count as zero, because 127 over it could be more than float32 holds."""


def word_of(values: tuple[int, ...]) -> tl.constexpr:
    """int8 values as the bytes of an integer, the first in the lowest."""
    return tl.constexpr(int.from_bytes([value & 0xFF for value in values], "little", signed=True))


SIXTEEN_A, SIXTEEN_B = word_of(SIXTEEN[:4]), word_of(SIXTEEN[4:8])
SIXTEEN_C, SIXTEEN_D = word_of(SIXTEEN[8:12]), word_of(SIXTEEN[12:])
EIGHT_A, EIGHT_B = word_of(EIGHT[:4]), word_of(EIGHT[4:])
"""The values of w4k and of w3k, four bytes in a word."""
MOVED_SIXTEEN, MOVED_EIGHT = (
    tuple(value + MOVED[len(table)] for value in table) for table in (SIXTEEN, EIGHT)
)
MOVED_A, MOVED_B = word_of(MOVED_SIXTEEN[:4]), word_of(MOVED_SIXTEEN[4:8])
MOVED_C, MOVED_D = word_of(MOVED_SIXTEEN[8:12]), word_of(MOVED_SIXTEEN[12:])
MOVED_EIGHT_A, MOVED_EIGHT_B = word_of(MOVED_EIGHT[:4]), word_of(MOVED_EIGHT[4:])
"""The same of groups whose scale is odd."""


@triton.jit
def dot4(a, b, total, DP4A: tl.constexpr):
    """total + the sum of four products of int8 numbers, the bytes of int32 words (of four dimensions)."""
    a, b = tl.broadcast(a, b)
    if DP4A:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        shift = 8 * tl.arange(0, 4)
        a, b = a[:, :, :, :, None] << shift >> 24, b[:, :, :, :, None] << shift >> 24
        total += tl.sum(a * b, axis=4)
    return total


@triton.jit
def permuted(low, high, selector, DP4A: tl.constexpr):
    """A word of four of the eight bytes of two words (of four dimensions), low's first.

    The lower four times four bits of the selector say which, from 0 to 7.
    """
    low, selector = tl.broadcast(low, selector)
    high, selector = tl.broadcast(high, selector)
    if DP4A:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        place = 8 * (selector[:, :, :, :, None] >> (4 * tl.arange(0, 4)) & 7)
        both = high.to(tl.int64) << 32 | low.to(tl.int64) & 0xFFFFFFFF
        bytes_ = both[:, :, :, :, None] >> place & 0xFF
        found = tl.sum(bytes_ << (8 * tl.arange(0, 4)), axis=4).to(tl.int32)
    return found


@triton.jit
def sixteen(words, odd, DP4A: tl.constexpr):
    """The values of w4k for the numbers of `words`: of the first and of the second halves of units, four in a word.

    odd: whether a unit's values are moved, [1, TILE, units, 1].
    """
    lower = words & LOWER_THREE
    # Then the byte that each number found in the table's lower or upper half, by its fourth bit.
    upper = words >> 1 & 0x44444444 | 0x32103210
    a, b = tl.where(odd, MOVED_A, SIXTEEN_A), tl.where(odd, MOVED_B, SIXTEEN_B)
    c, d = tl.where(odd, MOVED_C, SIXTEEN_C), tl.where(odd, MOVED_D, SIXTEEN_D)
    first = permuted(permuted(a, b, lower, DP4A), permuted(c, d, lower, DP4A), upper, DP4A)
    lower, upper = lower >> 16, upper >> 16
    second = permuted(permuted(a, b, lower, DP4A), permuted(c, d, lower, DP4A), upper, DP4A)
    return first, second


@triton.jit
def eight(pair, third, odd, DP4A: tl.constexpr):
    """The values of w3k, as `sixteen`. pair: two words of each unit, [1, TILE, units, 2]; third: [1, TILE, units]."""
    one, two = tl.split(pair)
    fourth = one >> 3 & 0x11111111 | two >> 2 & 0x22222222 | third >> 1 & 0x44444444
    words = tl.join(tl.join(one, third), tl.join(two, fourth))
    lower = tl.reshape(words, (third.shape[0], third.shape[1], third.shape[2], 4)) & LOWER_THREE
    a, b = tl.where(odd, MOVED_EIGHT_A, EIGHT_A), tl.where(odd, MOVED_EIGHT_B, EIGHT_B)
    return permuted(a, b, lower, DP4A), permuted(a, b, lower >> 16, DP4A)


@triton.jit
def five(words, upper):
    """The numbers of w5 in the upper bits of bytes, as `sixteen`. words: their lower bits; upper: [1, TILE, units]."""
    place = tl.arange(0, 4)[None, None, None, :]
    upper = upper[:, :, :, None]
    first = (words << 3 & 0x78787878) | (upper << (7 - place) & UPPER_ONE)
    return first, (words >> 1 & 0x78787878) | (upper << (3 - place) & UPPER_ONE)


@triton.jit
def six(words, upper):
    """Those of w6. upper: [1, TILE, units, 2], of the units' first and second halves."""
    shift = 6 - 2 * tl.arange(0, 4)[None, None, None, :]
    of_first, of_second = tl.split(upper)
    first = (words << 2 & 0x3C3C3C3C) | (of_first[:, :, :, None] << shift & UPPER_TWO)
    return first, (words >> 2 & 0x3C3C3C3C) | (of_second[:, :, :, None] << shift & UPPER_TWO)


@triton.jit
def is_odd(scale):
    """Of scales [1, TILE, units], [1, TILE, units, 1]."""
    return (scale.to(tl.int32) & 1)[:, :, :, None] != 0


@triton.jit
def magnitude(values):
    """|values| as integers of the same order. Unlike among floats, NaN is the largest and so gets through a maximum."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def over_largest(largest):
    """127 / largest, or 0 where that is zero or not finite."""
    enough = largest > SMALLEST_ACTIVATION
    return tl.where(enough, tl.div_rn(127.0, tl.where(enough, largest, 1.0)), 0.0)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), or x where CAP is 0."""
    if CAP > 0:
        fading = tl.exp(tl.abs(x) * (-2 / CAP))
        x = tl.where(x < 0.0, -CAP, CAP) * ((1.0 - fading) / (1.0 + fading))
    return x


@triton.jit
def bfloat16(x):
    """Rounded half to even by integers: a GPU's conversion does so too, and the interpreter's cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def rounded(values):
    """int8 numbers of a vector, as int32, and their step."""
    largest = tl.max(magnitude(values), axis=0).to(tl.float32, bitcast=True)
    scaled = values * over_largest(largest) + ROUNDING
    return (scaled.to(tl.int32, bitcast=True) << 24) >> 24, tl.div_rn(largest, 127.0)


@triton.jit
def normed(
    values, weight, bias, epsilon, inside, INPUTS: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The norm of each row of values [ROWS, PADDED], 0 where they are not `inside`; NORM is rms, layer or none."""
    if NORM == "layer":
        # As in fused_norm.h: the second round takes away what the first one's own rounding left of a large mean.
        values = tl.where(inside, values - (tl.sum(values, axis=1) / INPUTS)[:, None], 0.0)
        values = tl.where(inside, values - (tl.sum(values, axis=1) / INPUTS)[:, None], 0.0)
    if NORM != "none":
        variance = tl.sum(values * values, axis=1) / INPUTS
        values *= tl.div_rn(1.0, tl.sqrt_rn(variance + epsilon))[:, None]
        column = tl.arange(0, values.shape[1])
        values *= tl.load(weight + column, mask=column < INPUTS, other=0.0)[None, :]
        if HAS_BIAS:
            values += tl.load(bias + column, mask=column < INPUTS, other=0.0)[None, :]
    return values


@triton.jit
def quantized(values, GROUP: tl.constexpr):
    """int8 numbers of values [ROWS, PADDED], four to a word, and the steps that they count.

    Of each UNIT the words of its first and of its second half, [ROWS, 1, units, 4] each, and steps [ROWS, 1, units].
    """
    ROWS: tl.constexpr = values.shape[0]
    PADDED: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, (ROWS, PADDED // GROUP, GROUP))
    largest = tl.max(magnitude(groups), axis=2).to(tl.float32, bitcast=True)
    scaled = groups * over_largest(largest)[:, :, None] + ROUNDING
    numbers = tl.reshape(scaled.to(tl.int32, bitcast=True) & 0xFF, (ROWS, PADDED // UNIT, 2, 4, 4))
    words = tl.sum(numbers << (8 * tl.arange(0, 4)), axis=4)
    first, second = tl.split(tl.permute(words, (0, 1, 3, 2)))
    step = tl.div_rn(largest, 127.0)[:, :, None]
    step = tl.reshape(
        tl.broadcast_to(step, (ROWS, PADDED // GROUP, GROUP // UNIT)), (ROWS, 1, PADDED // UNIT)
    )
    return first[:, None, :, :], second[:, None, :, :], step


@triton.jit
def activations(
    x,
    weight,
    bias,
    epsilon,
    row,
    rows,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
):
    """The normed rows of x [rows, INPUTS] as `products` wants them for weights of this KIND."""
    column = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (column < INPUTS)[None, :]
    values = tl.load(x + row[:, None] * INPUTS + column[None, :], mask=inside, other=0.0)
    values = normed(values, weight, bias, epsilon, inside, INPUTS, NORM, NORM_BIAS)
    if KIND == "bf16":
        first = values[:, None, :]
        second = first
        step = first
    else:
        first, second, step = quantized(values, GROUP)
        if KIND == "w4":
            step *= 0.0625  # of weights that are sixteen times too large: see products
        elif KIND == "w5":
            step *= 0.125
        elif KIND == "w6":
            step *= 0.25
    return first, second, step


@triton.jit
def weights(
    numbers,
    scale,
    output,
    outputs,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The stored weights of some outputs, `output` [TILE]; those beyond `outputs` are zero.

    The words of the units' first and second halves, [1, TILE, units, 4] each, and scales [1, TILE, units]; for w4 and
    w4k both are the same word, for w3k, w5 and w6 they are what `eight`, `five` and `six` take, and for bf16 all three
    are the weights, [1, TILE, PADDED].
    """
    there = (output < outputs)[None, :, None]
    far = output.to(tl.int64)[None, :, None]  # a head can have more numbers than an int32 counts
    if KIND == "bf16":
        column = tl.arange(0, PADDED)[None, None, :]
        first = tl.load(numbers + far * INPUTS + column, mask=there & (column < INPUTS), other=0.0)
        second = first
        scales = first
    else:
        UNITS: tl.constexpr = INPUTS // UNIT
        UPPER: tl.constexpr = 2 if KIND == "w6" else 1 if KIND == "w5" else 0
        WORDS: tl.constexpr = 8 if KIND == "w8" else 4 + UPPER
        unit = tl.arange(0, PADDED // UNIT)[None, None, :]
        inside = there & (unit < UNITS)
        if KIND == "w3k":
            place = numbers + far * (3 * UNITS) + unit
            one = tl.load(place, mask=inside, other=0)
            first = tl.join(one, tl.load(place + UNITS, mask=inside, other=0))
            second = tl.load(place + 2 * UNITS, mask=inside, other=0)
        else:
            word = tl.arange(0, 4)[None, None, None, :]
            place = numbers + (far * (WORDS * UNITS))[:, :, :, None] + (unit * 4)[:, :, :, None] + word
            first = tl.load(place, mask=inside[:, :, :, None], other=0)
            second = first
            if KIND == "w8":
                second = tl.load(place + 4 * UNITS, mask=inside[:, :, :, None], other=0)
            elif UPPER > 0:
                place = numbers + far * ((4 + UPPER) * UNITS) + 4 * UNITS + unit
                second = tl.load(place, mask=inside, other=0)
                if KIND == "w6":
                    second = tl.join(second, tl.load(place + UNITS, mask=inside, other=0))
        scales = tl.load(scale + far * (INPUTS // GROUP) + unit * UNIT // GROUP, mask=inside, other=0)
    return first, second, scales


@triton.jit
def products(first, second, scale, x_first, x_second, step, KIND: tl.constexpr, DP4A: tl.constexpr):
    """Weights times activations, float32 [ROWS, TILE], of what `weights` and `activations` give; see `in_units`.

    4-bit numbers stay in the upper half of their bytes, where they are int8 numbers sixteen times as large, with their
    sign: no subtraction, and no sum of the activations. So do those of 5 and 6 bits, eight and four times as large.
    """
    if KIND == "bf16":
        found = tl.sum(first.to(tl.float32) * x_first, axis=2)
    else:
        if KIND == "w4":
            second = first & HIGH_HALVES
            first = (first << 4) & HIGH_HALVES
        elif KIND == "w4k":
            first, second = sixteen(first, is_odd(scale), DP4A)
        elif KIND == "w3k":
            first, second = eight(first, second, is_odd(scale), DP4A)
        elif KIND == "w5":
            first, second = five(first, second)
        elif KIND == "w6":
            first, second = six(first, second)
        total = dot4(second, x_second, dot4(first, x_first, 0, DP4A), DP4A)
        found = tl.sum(tl.sum(total, axis=3).to(tl.float32) * step * scale.to(tl.float32), axis=2)
    return found


@triton.jit
def in_units(found, unit, output, outputs, KIND: tl.constexpr):
    """`products` of the outputs [TILE] times what their scales are multiples of."""
    if KIND != "bf16":
        found *= tl.load(unit + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    return found
