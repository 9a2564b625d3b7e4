"""`python -m benchmarks.trellises`: what a code over the weights of a row gives beside the grids of `benchmarks.grids`.

Trellis-coded quantization (Marcellin and Fischer, 1990). Twice as many values as a weight's number can name are dealt
out to four sets in turns, D0 to D3. One bit u of each weight's number runs through a shift register, and the register
names the set: its last bit by z0 = u * h1, the other by z1 = u * h0, with Ungerboeck's polynomials. The other bits name
the value in the set. The Viterbi algorithm finds the numbers whose values are nearest to a row of weights. Values are
fitted in turns with the numbers. Rounding is plain, without calibration, and scales, bits and divergence are those of
`benchmarks.grids`.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track

from benchmarks.document import write
from benchmarks.grids import (
    MODEL,
    SCALE_BITS,
    Row,
    divergence_of,
    table_of,
    text_of,
    units,
)
from benchmarks.grids import row_of as plain_row
from optigpu.models.loading.load import load_model
from optigpu.ops.four_bits.quantize import rounded_scale
from optigpu.report import console
from optigpu.surgery.places import linear_places, weight_of

POLYNOMIALS = {4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 256: (0o435, 0o362)}
"""h0 and h1 by the number of states (Ungerboeck, 1982, table I): bit k is of u, k weights ago."""
KINDS = (*((4, states, group) for group in (32, 64, 128) for states in (4, 8)), (3, 8, 32), (3, 8, 64))
"""Bits of a number, states of the register, weights that share a scale."""
FITS = 10
SAMPLE, SAMPLED = 512, 64
"""Rows of each layer that values are fitted on, and weights of each."""
AT_ONCE = 8192
"""Rows whose numbers are looked for together."""
FACTORS = (0.9, 1.0, 1.1, 1.2)
"""Of the scales by which the largest weight of a group becomes the largest value: those tried for each layer."""


class Code(NamedTuple):
    """values [2 * 2**bits] in order, of which every fourth one is in the same set."""

    values: torch.Tensor
    states: int


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trellises", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a file of text")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = text_of(options.text, options.windows, options.tokens)
    plain = load_model(MODEL, device="cpu", dtype="float32")
    rows = [plain_row(0, 32, plain, text)]
    for bits, states, group in track(KINDS, "Coding", console=console(stderr=True)):
        rows.append(row_of(bits, states, group, plain, text))
    console().print(table_of(rows))
    if options.output:
        write(options.output, "trellises", {"model": str(MODEL), "rows": [asdict(row) for row in rows]})
    return 0


def row_of(bits: int, states: int, group: int, plain: torch.nn.Module, text: torch.Tensor) -> Row:
    """All linear layers of the model with such a code."""
    model = load_model(MODEL, device="cpu", dtype="float32")
    weights = [weight_of(place.layer) for place in linear_places(model)]
    code = fitted(torch.cat([_part(weight, group) for weight in weights]), bits, states)
    error = square = 0.0
    with torch.no_grad():
        for weight in weights:
            stored = coded(weight, group, code)
            error += float((stored - weight).square().sum())
            square += float(weight.square().sum())
            weight.copy_(stored)
    name = f"{bits} bits, {states} states"
    return Row(name, group, bits + SCALE_BITS / group, error / square, divergence_of(model, plain, text))


def _largest(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Of each group, [groups, 1]."""
    return weight.reshape(-1, group).abs().amax(dim=1, keepdim=True).clamp_min(1e-12)


def _part(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Some weights of a layer, in units of the largest of their groups, [SAMPLE, SAMPLED]."""
    numbers = (weight.reshape(-1, group) / _largest(weight, group)).view_as(weight)
    rows = numbers[torch.randperm(len(numbers))[:SAMPLE]]
    start = int(torch.randint(0, rows.shape[1] - SAMPLED + 1, ()))
    return rows[:, start : start + SAMPLED]


def fitted(sample: torch.Tensor, bits: int, states: int) -> Code:
    """Values for such weights: first those that share out the weights equally, then numbers and means in turns."""
    count = 2 ** (bits + 1)
    shares = (torch.arange(count) + 0.5) / count
    code = Code(torch.quantile(sample.flatten()[: 2**22], shares) * 1.1, states)
    for _ in range(FITS):
        at = nearest(sample, code).flatten()
        sums, sizes = (
            torch.zeros(count).index_add_(0, at, each)
            for each in (sample.flatten(), torch.ones(sample.numel()))
        )
        code = Code(torch.where(sizes > 0, sums / sizes, code.values).sort().values, states)
    return code


def coded(weight: torch.Tensor, group: int, code: Code) -> torch.Tensor:
    """The weights as they are stored: numbers along rows, then the scale of each group that leaves the least."""
    largest, wanted = _largest(weight, group), weight.reshape(-1, group)
    unit = units(weight, group)
    best, least = weight, torch.inf
    for factor in FACTORS:
        scale = largest * factor
        numbers = (wanted / scale).view_as(weight)
        found = code.values[nearest(numbers, code)].view_as(wanted)
        exact = (found * wanted).sum(1, keepdim=True) / found.square().sum(1, keepdim=True).clamp_min(1e-12)
        stored = found * rounded_scale(exact, unit)
        loss = float((stored - wanted).square().sum())
        if loss < least:
            best, least = stored.view_as(weight), loss
    return best


def nearest(numbers: torch.Tensor, code: Code) -> torch.Tensor:
    """Indices of values [n, length] by the Viterbi algorithm: of all that the code allows, those nearest in squares."""
    return torch.cat([_along_rows(part, code) for part in numbers.split(AT_ONCE)])


def _along_rows(numbers: torch.Tensor, code: Code) -> torch.Tensor:
    count, length = numbers.shape
    sets, before = _transitions(code.states)
    cost = torch.full((count, code.states), torch.inf)
    cost[:, 0] = 0
    came = torch.empty(length, count, code.states, dtype=torch.bool)
    chosen = torch.empty(length, count, 4, dtype=torch.uint8)
    for at in range(length):
        in_set = (numbers[:, at, None] - code.values).square().view(count, -1, 4)
        errors, index = in_set.min(dim=1)  # [count, 4]
        chosen[at] = index.to(torch.uint8)
        first, second = (cost[:, before[side]] + errors[:, sets[side]] for side in (0, 1))
        came[at] = second < first
        cost = torch.minimum(first, second)
    state = cost.argmin(dim=1)
    found = torch.empty(count, length, dtype=torch.long)
    for at in range(length - 1, -1, -1):
        side = came[at].gather(1, state[:, None])[:, 0].long()
        taken = sets[side, state]
        found[:, at] = 4 * chosen[at].gather(1, taken[:, None])[:, 0].long() + taken
        state = before[side, state]
    return found


def _transitions(states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each new state and the two before it: the set, and that state. Bit k of a state is u, k weights ago."""
    h0, h1 = POLYNOMIALS[states]
    sets, before = torch.empty(2, states, dtype=torch.long), torch.empty(2, states, dtype=torch.long)
    for new in range(states):
        for dropped in (0, 1):
            register = new | dropped * states  # u now is bit 0
            before[dropped, new] = register >> 1
            z1, z0 = ((register & each).bit_count() % 2 for each in (h0, h1))
            sets[dropped, new] = 2 * z1 + z0
    return sets, before


if __name__ == "__main__":
    sys.exit(main())
