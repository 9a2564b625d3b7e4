"""`python -m benchmarks.one_line`: what `quantize(model)` and `accelerate(model)` do to the speed of `model.generate`.

Each way has a process of its own with the model loaded; the processes take turns, a request each, so that what else the
machine does falls on all of them. A ratio is a turn's, over plain `generate` in the same turn; tables show medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import write
from optigpu.hardware import probe
from optigpu.report import Column, Grid, console
from optigpu.report.formats import terminal
from optigpu.report.numbers import short

PLAIN = "generate"
WAYS = (PLAIN, "quantize", "quantize, bits=4", "accelerate")
WARM_UP = 2


@dataclass(frozen=True)
class Figures:
    """A way's tokens/s, turn by turn, the ratios to plain generate, and the bytes of its weights."""

    name: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    weight_bytes: int


def changed(way: str, model: Any) -> Any:
    """The model in one line."""
    from optigpu import accelerate, quantize

    lines: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: model,
        "quantize": lambda: quantize(model),
        "quantize, bits=4": lambda: quantize(model, bits=4),
        "accelerate": lambda: accelerate(model),
    }
    return lines[way]()


def serve(way: str, options: argparse.Namespace) -> None:
    """Loads the model, prints its bytes when it is warm, and for each line that it reads the tokens/s of a request."""
    import torch

    from optigpu.models.loading.footprint import weight_bytes
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(options.threads)
    model = changed(way, load_model(parse_reference(options.model), device="cpu", dtype="float32"))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, options.prompt_tokens), generator=generator)

    def rate() -> float:
        begin = time.perf_counter()
        tokens = model.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False)
        seconds = time.perf_counter() - begin
        return float((tokens.shape[1] - options.prompt_tokens) / seconds)

    for _ in range(WARM_UP):
        rate()
    print(weight_bytes(model), flush=True)
    for _ in sys.stdin:
        print(rate(), flush=True)


def measure(options: argparse.Namespace) -> list[Figures]:
    """All ways, in turns."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as leave:
        running: dict[str, subprocess.Popen[str]] = {}
        sizes: dict[str, int] = {}
        for way in WAYS:  # one after the other, so that they do not slow each other's packing
            running[way] = leave.enter_context(_started(way))
            sizes[way] = int(_line(running[way]))
        for _ in range(options.turns):
            for way, process in running.items():
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                rates[way].append(float(_line(process)))
        for process in running.values():
            assert process.stdin is not None
            process.stdin.close()
    return [Figures(way, tuple(rates[way]), _ratios(rates[way], rates[PLAIN]), sizes[way]) for way in WAYS]


def _started(way: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.one_line", *sys.argv[1:], "--serve", way]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a measuring process ended; its error stands above")
    return line


def _ratios(mine: Sequence[float], plain: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other for one, other in zip(mine, plain, strict=True))


def _grid(found: Sequence[Figures], options: argparse.Namespace, load: float) -> Grid:
    headings = ("one line", "tokens/s", "x generate", "lowest..highest", "MB")
    rows = tuple(
        (
            each.name,
            short(statistics.median(each.rates)),
            f"{statistics.median(each.ratios):.2f}",
            f"{min(each.ratios):.2f}..{max(each.ratios):.2f}",
            short(each.weight_bytes / 1e6),
        )
        for each in found
    )
    notes = (
        f"{options.prompt_tokens} tokens + {options.new_tokens}, {options.turns} turns, {options.threads} threads, "
        f"whole requests with the prompt, on {probe().hardware_class}; a load of {load:.1f} before the run.",
    )
    columns = tuple(Column(heading, right=heading != "one line") for heading in headings)
    return Grid(f"{options.model}, float32", columns, rows, notes)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--threads", type=int, default=probe().cpu_cores)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    load = os.getloadavg()[0]
    found = measure(options)
    console().print(terminal(_grid(found, options, load)))
    if options.output:
        asked = {
            name: getattr(options, name)
            for name in ("model", "prompt_tokens", "new_tokens", "turns", "threads")
        }
        write(
            options.output,
            "one_line",
            {**asked, "load_before": load, "ways": [asdict(each) for each in found]},
        )


if __name__ == "__main__":
    main()
