"""`python -m benchmarks.engine_tools`: the speed that a job measures of each engine, beside the engine's own tool.

A variant's process and those of the tools run the same file with the same threads, prompt and tokens, and take turns,
a request each. A ratio is ours over theirs in the same turn; the goal is a median within 5%. Where a package has no
tool of its own, its plain API is timed in the loop that its documentation shows. --show prints a file of results as
Markdown.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.document import write
from benchmarks.engine_cases import (
    EAGER,
    ONNX_FP32,
    ONNX_INT4,
    ONNX_INT8,
    OPENVINO_FP32,
    OPENVINO_INT4,
    OPENVINO_INT8,
    Q8_0,
)
from benchmarks.own_tools import Tool
from benchmarks.stacks import Q4_K_M, Case, Stack
from benchmarks.turns import Figures, measure
from optigpu.vocabulary import Document, OptiGPUError

GOAL = 0.05
"""How far the median ratio may be from 1."""
PACKAGE = "benchmarks.own_tools"
NOT_MEASURED = {
    "onnxruntime_perf_test": "ONNX Runtime's package does not contain it; that of the package, "
    "onnxruntime.tools.onnxruntime_test, gives random numbers to inputs that say how long the cache is",
    "benchmark_app": "OpenVINO's gives every inference inputs of one shape, and a decoder's mask grows with each step",
}
"""Tools that time no decoding of these files, with the reason."""


@dataclass(frozen=True)
class Line:
    """Ours and theirs in tokens/s, medians over the turns, and the ratio turn by turn; else a `reason` alone."""

    stack: str
    tool: str
    ours: float | None = None
    theirs: float | None = None
    ratios: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """The median of ours over theirs."""
        return statistics.median(self.ratios) if self.ratios else None


@dataclass(frozen=True)
class Engine:
    """Stacks of one engine, and its tools: the name of each, its module, and what more its command line has."""

    stacks: tuple[Stack, ...]
    tools: tuple[tuple[str, str, tuple[str, ...]], ...]

    def tools_of(self, stack: Stack) -> tuple[Tool, ...]:
        """What times a stack."""
        return tuple(Tool(name, f"{PACKAGE}.{module}", stack, more) for name, module, more in self.tools)


def engines(llama_bench: str) -> tuple[Engine, ...]:
    """In the order of the table; `llama_bench` is the program."""
    return (
        Engine((EAGER,), (("torch.utils.benchmark.Timer of generate", "torch_timer", ()),)),
        Engine(
            (Q8_0, Q4_K_M),
            (
                ("llama-bench", "llama_bench", ("--llama-bench", llama_bench)),
                ("llama_perf_context of Llama.generate", "llama_counters", ()),
            ),
        ),
        Engine(
            (ONNX_FP32, ONNX_INT8, ONNX_INT4), (("run_with_iobinding of OrtValues", "onnxruntime_loop", ()),)
        ),
        Engine(
            (OPENVINO_FP32, OPENVINO_INT8, OPENVINO_INT4),
            (
                ("perf_metrics of LLMPipeline", "genai_pipeline", ()),
                ("InferRequest.start_async and wait", "openvino_loop", ()),
            ),
        ),
    )


def lines_of(stack: Stack, tools: Sequence[Tool], case: Case, turns: int) -> Iterator[Line]:
    """A stack beside its tools; where the stack itself cannot be measured, each tool has that reason."""
    try:
        ours, *others = measure([stack, *tools], case, turns)
    except OptiGPUError as error:
        yield from (Line(stack.name, tool.name, reason=str(error)) for tool in tools)
        return
    yield from (compared(ours, theirs) for theirs in others)


def compared(ours: Figures, theirs: Figures) -> Line:
    """By the turns that both had."""
    if theirs.reason is not None:
        return Line(ours.name, theirs.name, reason=theirs.reason)
    ratios = tuple(mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True))
    return Line(ours.name, theirs.name, ours.rate, theirs.rate, ratios)


def is_reached(line: Document) -> bool:
    """Whether the median ratio is within the goal."""
    return bool(line["ratios"]) and abs(statistics.median(line["ratios"]) - 1) <= GOAL


def markdown(document: Document) -> str:
    """A row for each tool, then those that were not measured."""
    case = document["case"]
    shape = f"{case['prompt_tokens']} tokens + {case['new_tokens']}, {document['turns']} turns"
    return "\n".join(
        [
            f"## Beside each engine's own tool: `preset:{case['preset']}`, {shape}",
            "",
            f"| variant | tool | ours (tokens/s) | theirs | ours/theirs | lowest..highest | within {GOAL:.0%} |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- |",
            *map(_row, document["lines"]),
            "",
            *(f"- Not measured: {name}: {reason}." for name, reason in NOT_MEASURED.items()),
            "",
        ]
    )


def _row(line: Document) -> str:
    names = (line["stack"], line["tool"])
    if line["reason"]:
        why = " ".join(line["reason"].replace("|", "/").split())
        return f"| {' | '.join([*names, f'not measured: {why}', '', '', '', ''])} |"
    ratios = line["ratios"]
    figures = (f"{line['ours']:.1f}", f"{line['theirs']:.1f}", f"{statistics.median(ratios):.3f}")
    spread = f"{min(ratios):.3f}..{max(ratios):.3f}"
    return f"| {' | '.join([*names, *figures, spread, 'yes' if is_reached(line) else 'NO'])} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_tools", description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        help="of these backends alone: torch, llama_cpp, onnxruntime, openvino",
    )
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--llama-bench", default="llama-bench", help="the program, where it is not on the PATH"
    )
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print this file of results as Markdown instead")
    return parser.parse_args()


def main() -> int:
    """Measures or shows; the exit status is 0 if something was measured, and all of that is within the goal."""
    options = _options()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return 0
    case = Case(options.preset, options.prompt_tokens, options.new_tokens)
    load = os.getloadavg()[0]
    lines = [
        asdict(line) | {"ratio": line.ratio}
        for engine in engines(options.llama_bench)
        for stack in engine.stacks
        if stack.backend in (options.engines or [stack.backend])
        for line in lines_of(stack, engine.tools_of(stack), case, options.turns)
    ]
    document = {
        "load_before": load,
        "case": asdict(case),
        "turns": options.turns,
        "goal": GOAL,
        "lines": lines,
    }
    print(markdown(document))
    if options.output:
        write(options.output, "engine_tools", document)
    measured = [line for line in lines if line["reason"] is None]
    return 0 if measured and all(map(is_reached, measured)) else 1


if __name__ == "__main__":
    sys.exit(main())
