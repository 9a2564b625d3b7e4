"""`python -m benchmarks.peer_modes`: the libraries that no backend runs, each in the mode that decodes fastest here.

bitsandbytes' NF4 and torchao's int8 compute in float32 or in bfloat16. A peer's process tries both on this machine and
runs in the faster one; what it tried stands beside the rate. All peers take turns with transformers in float32, a
request each, and ratios are of the same turn. `vs_peers` and `layers` take the same processes.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks.document import write
from benchmarks.peers.preparations import MODES
from benchmarks.stacks import Case
from benchmarks.turns import Figures, measure
from benchmarks.vs_cases import ELSEWHERE, FP32
from optigpu.report import console


def row(figures: Figures) -> tuple[str, ...]:
    """As the table has it."""
    if figures.reason is not None or figures.rate is None:
        return (figures.name, "", f"not measured: {figures.reason}", "", "")
    modes = figures.details.get("modes", {})
    tried = ", ".join(f"{mode} {rate:.1f}" for mode, rate in modes.items())
    spread = f"{figures.ratio:.2f}x, {min(figures.ratios):.2f} to {max(figures.ratios):.2f}"
    return (figures.name, max(modes, key=modes.__getitem__, default=""), tried, f"{figures.rate:.1f}", spread)


def main() -> int:
    """Prints the table; 0 where every peer that has several modes was measured in one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_modes", description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args()
    case = Case(options.preset, options.prompt_tokens, options.new_tokens)
    found = measure([FP32, *ELSEWHERE], case, options.turns)
    table = Table("peer", "mode", "tokens/s of each mode", "tokens/s", "over fp32", title=options.preset)
    for figures in found:
        table.add_row(*row(figures))
    console().print(table)
    if options.output:
        lines = [asdict(each) | {"rate": each.rate, "ratio": each.ratio} for each in found]
        write(options.output, "peer_modes", {"case": asdict(case), "turns": options.turns, "lines": lines})
    several = {peer.name for peer in ELSEWHERE if peer.weights in MODES}
    chosen = {figures.name for figures in found if "modes" in figures.details}
    return 0 if several <= chosen else 1


if __name__ == "__main__":
    sys.exit(main())
