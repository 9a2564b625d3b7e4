"""`python -m benchmarks.packing`: how long native_decode takes to pack a model's weights, beside plain rounding.

The model's own text, what its layers are given, and 4-bit weights whose errors make up for each other, in a process of
its own for each preset; plain rounding is `calibration="none"`. The cache of packed weights is off. Goals, in seconds,
for `calibration="self"`: 30 for GPT-2, 300 for Llama-3.2-1B.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.document import write
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.report import console
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.packed_store import BOUND

GOALS_S = {"gpt2": 30.0, "llama-3.2-1b": 300.0}
ONE = "--one"
"""Asks this program for the seconds of one preset and one calibration."""


@dataclass(frozen=True)
class Row:
    """Seconds of each kind of packing; `goal_s` is for calibration "self"."""

    preset: str
    calibrated_s: float
    sequential_s: float
    rounded_s: float
    goal_s: float | None


def main() -> int:
    """Prints the table; 0 where each goal is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--presets", nargs="+", default=list(GOALS_S))
    parser.add_argument("--dtype", default="float32", help="what the model is loaded in")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument(ONE, choices=("self", "sequential", "none"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(packing_s(options.presets[0], options.dtype, options.one))
        return 0
    rows = [row_of(preset, options.dtype) for preset in options.presets]
    console().print(table_of(rows))
    if options.output:
        about = {"goals_s": GOALS_S, "dtype": options.dtype}
        write(options.output, "packing", about | {"rows": [asdict(row) for row in rows]})
    return 0 if all(row.goal_s is None or row.calibrated_s <= row.goal_s for row in rows) else 1


def row_of(preset: str, dtype: str) -> Row:
    """Each kind in a process of its own."""
    seconds = {}
    for calibration in ("none", "self", "sequential"):
        console(stderr=True).print(f"{preset}: packing with calibration {calibration}")
        own = (ONE, calibration, "--presets", preset, "--dtype", dtype)
        done = subprocess.run(
            (sys.executable, "-m", "benchmarks.packing", *own), capture_output=True, text=True, check=True
        )
        seconds[calibration] = float(done.stdout)
    return Row(preset, seconds["self"], seconds["sequential"], seconds["none"], GOALS_S.get(preset))


def packing_s(preset: str, dtype: str, calibration: str) -> float:
    """Of one packing, without loading the model."""
    os.environ[BOUND.variable] = "0"
    model = load_model(parse_reference(f"preset:{preset}"), device="cpu", dtype=dtype)
    technique = NativeDecode.model_validate({"calibration": calibration})
    began = time.perf_counter()
    technique.modules(model, Notes())
    return time.perf_counter() - began


def table_of(rows: list[Row]) -> Table:
    """Seconds of each kind, and the goal."""
    table = Table(
        "preset", "calibrated (s)", "one after the other (s)", "plain rounding (s)", "goal (s)", "met"
    )
    for row in rows:
        goal = "-" if row.goal_s is None else f"{row.goal_s:.0f}"
        met = "-" if row.goal_s is None else "yes" if row.calibrated_s <= row.goal_s else "no"
        seconds = (row.calibrated_s, row.sequential_s, row.rounded_s)
        table.add_row(row.preset, *(f"{each:.1f}" for each in seconds), goal, met)
    return table


if __name__ == "__main__":
    sys.exit(main())
