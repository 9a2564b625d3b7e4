"""Everything that BenchmarkEngine measures, in one go: matrix products; with --full operators and a model as well.

    python benchmarks/run_all.py [--full] [--precision int8] [--model facebook/opt-125m] [--output results/]

Tables go to stdout; results, charts and the comparison with what is claimed for an RTX 5090 go to the folder.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from optigpu import BenchmarkEngine, CompileOptimizer, KernelOptimizer, MemoryOptimizer, QuantizationOptimizer
from optigpu.facade.quantized import STACKS
from optigpu.vocabulary import OptiGPUError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with a sentence on stderr."""
    asked = _asked(arguments)
    try:
        _measure(asked)
    except OptiGPUError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(asked: Namespace) -> None:
    engine = BenchmarkEngine()
    engine.run_matmul_suite(full=asked.full)
    if asked.full:
        KernelOptimizer.benchmark_layernorm()
        KernelOptimizer.benchmark_attention()
        CompileOptimizer.benchmark(asked.model)
        for precision in ("fp32", asked.precision):
            model, tokenizer = QuantizationOptimizer.load(asked.model, precision=precision)
            MemoryOptimizer.print_stats(f"{asked.model} in {precision}")
            engine.run_inference(model, tokenizer, label=f"{asked.model}, {precision}")
    engine.report()
    print("Written:", *engine.save(asked.output), sep="\n  ")


def _asked(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description="Measure this machine, beside what is claimed for an RTX 5090.")
    parser.add_argument("--full", action="store_true", help="also norms, attention, compilation and a model")
    parser.add_argument("--precision", choices=tuple(STACKS), default="int4", help="with --full: the model's")
    parser.add_argument(
        "--model", default="preset:gpt2", help="with --full: a reference or a name of the hub"
    )
    parser.add_argument("--output", default="results/", help="the folder to write to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
