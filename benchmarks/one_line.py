"""`python -m benchmarks.one_line`: what `quantize(model)` and `accelerate(model)` do to the speed of `model.generate`.

Each line has a process of its own with the model loaded; the processes take turns, a request each, so that what else
the machine does falls on all of them. A ratio is a turn's, over plain `generate` with the same settings in the same
turn; tables show medians. `accelerate` is asked for greedy text, for settings whose processors look at the logits of
native steps, and for beams, which transformers' own loop decodes on the unpacked weights.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
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

PLAIN, ACCELERATED = "generate", "accelerate"
LINES = (PLAIN, "quantize", "quantize, bits=4", ACCELERATED)
GREEDY = "greedy"
SETTINGS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 4},
    "sampled": {"do_sample": True, "top_k": 50},
    "beams": {"num_beams": 2},
}
WARM_UP = 2


@dataclass(frozen=True)
class Way:
    """One of LINES, and the settings of its requests."""

    line: str
    settings: str


WAYS = (
    *(Way(line, GREEDY) for line in LINES),
    *(Way(line, settings) for settings in SETTINGS if settings != GREEDY for line in (PLAIN, ACCELERATED)),
)


@dataclass(frozen=True)
class Figures:
    """A way's tokens/s, turn by turn, the ratios to plain generate with its settings, and the bytes of its weights."""

    name: str
    settings: str
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    weight_bytes: int


def changed(line: str, model: Any) -> Any:
    """The model in one line."""
    from optigpu import accelerate, quantize

    lines: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: model,
        "quantize": lambda: quantize(model),
        "quantize, bits=4": lambda: quantize(model, bits=4),
        ACCELERATED: lambda: accelerate(model),
    }
    return lines[line]()


def serve(line: str, options: argparse.Namespace) -> None:
    """Loads the model, prints its bytes when it is warm, and for settings whose name it reads a request's tokens/s."""
    import torch

    from optigpu.models.loading.footprint import weight_bytes
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(options.threads)
    model = changed(line, load_model(parse_reference(options.model), device="cpu", dtype="float32"))
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, options.prompt_tokens), generator=generator)

    def rate(settings: str) -> float:
        asked = {"do_sample": False, "max_new_tokens": options.new_tokens} | SETTINGS[settings]
        begin = time.perf_counter()
        tokens = model.generate(prompt, **asked)
        seconds = time.perf_counter() - begin
        return float((tokens.shape[1] - options.prompt_tokens) / seconds)

    size = weight_bytes(model)  # before anything is unpacked
    warnings.simplefilter("ignore", UserWarning)  # of what is left to transformers
    for way in WAYS:
        if way.line == line:
            for _ in range(WARM_UP):
                rate(way.settings)
    print(size, flush=True)
    for settings in sys.stdin:
        print(rate(settings.strip()), flush=True)


def measure(options: argparse.Namespace) -> list[Figures]:
    """All ways, in turns."""
    rates: dict[Way, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as leave:
        running: dict[str, subprocess.Popen[str]] = {}
        sizes: dict[str, int] = {}
        for line in LINES:  # one after the other, so that they do not slow each other's packing
            running[line] = leave.enter_context(_started(line))
            sizes[line] = int(_line(running[line]))
        for _ in range(options.turns):
            for way in WAYS:
                process = running[way.line]
                assert process.stdin is not None
                process.stdin.write(f"{way.settings}\n")
                process.stdin.flush()
                rates[way].append(float(_line(process)))
        for process in running.values():
            assert process.stdin is not None
            process.stdin.close()
    plain = {way.settings: rates[way] for way in WAYS if way.line == PLAIN}
    return [
        Figures(way.line, way.settings, tuple(found), _ratios(found, plain[way.settings]), sizes[way.line])
        for way, found in rates.items()
    ]


def _started(line: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.one_line", *sys.argv[1:], "--serve", line]
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
    headings = ("one line", "settings", "tokens/s", "x generate", "lowest..highest", "MB")
    rows = tuple(
        (
            each.name,
            each.settings,
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
    columns = tuple(Column(heading, right=heading not in ("one line", "settings")) for heading in headings)
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
    parser.add_argument("--serve", choices=LINES, help=argparse.SUPPRESS)
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
