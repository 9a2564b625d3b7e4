"""`python -m benchmarks.grids`: what grids of 16 values can give, before any operator is written for them.

All linear layers of bundled:tiny are rounded with the scale that leaves the least squared error, without calibration:
evenly spaced values as `w4` has them, one table of 16 values for all layers, and two of which each group takes the
better one. Tables are found by Lloyd's algorithm on the weights themselves, so that they are as good as tables of that
kind can be. Scales are multiples of a unit of each row, by 8-bit numbers. Divergence is that of the rounded model's
next tokens from its own, on --text. `--normal` finds the values of ops/four_bits/table.py instead, 16 and 8.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from rich.table import Table

from benchmarks.document import write
from optigpu.models.loading.load import load_model, load_tokenizer
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import rounded_scale
from optigpu.ops.four_bits.table import FURTHEST
from optigpu.report import console
from optigpu.surgery.places import linear_places, weight_of

MODEL = parse_reference("bundled:tiny")
GROUPS = (32, 64, 128)
SCALE_BITS, LARGEST_SCALE = 8, 127
EVEN = (torch.arange(16.0) - 8) / 8
SCALES = torch.linspace(0.72, 1.16, 24)
"""Tried for each group, in units of the scale by which its largest weight becomes the largest value."""
LLOYD_ROUNDS = {16: 8, 8: 24}
"""By the count of values: few of them move slowly."""
SAMPLE = 2**13
"""Groups of each layer that tables are found on."""
AT_ONCE = 8
"""Windows of the text in a pass."""


class Rounded(NamedTuple):
    """groups [n, size] as they are stored; which table each took, int64 [n]; its scale [n, 1]."""

    weights: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Row:
    """`error` is the squared one, of the weights' squares; `kld` the mean divergence in nats."""

    grid: str
    group: int
    bits: float
    error: float
    kld: float


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grids", description=__doc__)
    parser.add_argument("--text", type=Path, help="a file of text")
    parser.add_argument("--normal", action="store_true", help="find tables for normally distributed weights")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.normal:
        for values in (16, 8):
            (table,) = lloyd([torch.randn(512, 4096)], 64, 1, values)
            console().print(*(round(float(value)) for value in table * -FURTHEST))
        return 0
    if options.text is None:
        parser.error("--text is needed: a file of text")
    text = text_of(options.text, options.windows, options.tokens)
    kinds = [(tables, group) for group in GROUPS for tables in (0, 1, 2)]
    plain = load_model(MODEL, device="cpu", dtype="float32")
    rows = [
        row_of(tables, group, plain, text)
        for tables, group in track(kinds, "Rounding", console=console(stderr=True))
    ]
    console().print(table_of(rows))
    if options.output:
        write(options.output, "grids", {"model": str(MODEL), "rows": [asdict(row) for row in rows]})
    return 0


def text_of(path: Path, windows: int, tokens: int) -> torch.Tensor:
    """The beginning of a file in windows [windows, tokens]. Ends the program where the file is shorter."""
    found = load_tokenizer(MODEL).encode(path.read_text())[: windows * tokens]
    if len(found) < windows * tokens:
        sys.exit(f"{path} has {len(found)} tokens; {windows * tokens} are needed.")
    return torch.tensor(found).view(windows, tokens)


def row_of(tables: int, group: int, plain: torch.nn.Module, text: torch.Tensor) -> Row:
    """With so many tables; none are the even values."""
    model = load_model(MODEL, device="cpu", dtype="float32")
    weights = [weight_of(place.layer) for place in linear_places(model)]
    found = [EVEN] if tables == 0 else lloyd(weights, group, tables)
    error = square = 0.0
    with torch.no_grad():
        for weight in weights:
            stored = rounded(weight.reshape(-1, group), found, units(weight, group)).weights.view_as(weight)
            error += float((stored - weight).square().sum())
            square += float(weight.square().sum())
            weight.copy_(stored)
        kld = divergence_of(model, plain, text)
    name = ("even values", "one table", "two tables")[tables]
    bits = 4 + (SCALE_BITS + (tables == 2)) / group
    return Row(name, group, bits, error / square, kld)


def rounded(groups: torch.Tensor, tables: Sequence[torch.Tensor], unit: torch.Tensor | None) -> Rounded:
    """Each group with the table and the scale that leave the least. unit: what scales are multiples of, [n, 1]."""
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    best = Rounded(groups, torch.zeros(len(groups), dtype=torch.long), torch.ones_like(largest))
    least = torch.full_like(largest, torch.inf)
    for index, table in enumerate(tables):
        end = table[table.abs().argmax()]
        between = (table[1:] + table[:-1]) / 2
        for factor in torch.cat([SCALES, -SCALES]):
            exact = largest / end * factor
            scale = exact.masked_fill(exact == 0, 1) if unit is None else rounded_scale(exact, unit)
            tried = table[torch.bucketize(groups / scale, between)] * scale
            loss = (tried - groups).square().sum(dim=1, keepdim=True)
            better = loss < least
            least = torch.where(better, loss, least)
            best = Rounded(
                torch.where(better, tried, best.weights),
                torch.where(better[:, 0], index, best.table),
                torch.where(better, scale, best.scale),
            )
    return best


def units(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Of each group: 1/127 of the largest scale that is tried for its row, rounded to bfloat16."""
    unit = (weight.abs().amax(dim=1) * SCALES[-1] / LARGEST_SCALE).bfloat16().float()
    return unit.masked_fill(unit == 0, 1).repeat_interleave(weight.shape[1] // group).unsqueeze(1)


def lloyd(weights: Sequence[torch.Tensor], group: int, count: int, values: int = 16) -> list[torch.Tensor]:
    """So many tables of so many values from -1 to 1 in steps of 1/127, for groups of these weights."""
    drawn = [
        weight.reshape(-1, group)[torch.randperm(weight.numel() // group)[:SAMPLE]] for weight in weights
    ]
    sample = torch.cat(drawn)
    denser_at_0 = torch.linspace(-1, 1, values).mul(1.3).sinh().div(torch.tensor(1.3).sinh())
    tables = [denser_at_0, EVEN][:count]
    for _ in range(LLOYD_ROUNDS[values]):
        found = rounded(sample, tables, None)
        tables = [_centres(sample, found, index, table) for index, table in enumerate(tables)]
    return [(table / table.abs().max() * LARGEST_SCALE).round() / LARGEST_SCALE for table in tables]


def _centres(groups: torch.Tensor, found: Rounded, index: int, table: torch.Tensor) -> torch.Tensor:
    """The means of what was rounded to each value of a table, weighted by how much an error of it counts."""
    these = found.table == index
    values, counts = (groups[these] / found.scale[these]).flatten(), found.scale[these].square()
    counted = counts.expand(-1, groups.shape[1]).flatten()
    nearest = torch.bucketize(values, (table[1:] + table[:-1]) / 2)
    sums, sizes = (
        torch.zeros(len(table)).index_add_(0, nearest, each) for each in (values * counted, counted)
    )
    moved: torch.Tensor = torch.where(sizes > 0, sums / sizes, table).sort().values
    return moved


@torch.inference_mode()
def divergence_of(model: torch.nn.Module, plain: torch.nn.Module, text: torch.Tensor) -> float:
    """The mean over the text's tokens, in nats."""
    total = 0.0
    for windows in text.split(AT_ONCE):
        expected, found = (each(windows).logits.double().log_softmax(-1) for each in (plain, model))
        total += float((expected.exp() * (expected - found)).sum())
    return total / text.numel()


def table_of(rows: Sequence[Row]) -> Table:
    """Beside the even values in groups of 32, which are what `w4` has."""
    table = Table("grid", "group", "bits a weight", "squared error", "divergence (nat)", "beside w4")
    for row in rows:
        share = f"{row.kld / rows[0].kld - 1:+.1%}"
        table.add_row(
            row.grid, str(row.group), f"{row.bits:.4f}", f"{row.error:.6f}", f"{row.kld:.5f}", share
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
