"""`python -m benchmarks.engines`: every engine that is installed on the same weights, one job for each model.

A job's processes take turns, eight variants at most at once. bundled:tiny has speed and quality, the presets speed
alone: their weights are random. An engine that is missing is a row with the reason. --convert writes each engine's
files, which are kept, and measures nothing, so that a job's budget of seconds is for measuring. --show prints files of
results as Markdown.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.jobs import TEXT, convert, run_shown
from benchmarks.stacks import (
    IQ4_K,
    IQ4_KS,
    ONNX_FP32,
    ONNX_INT4,
    ONNX_INT8,
    OPENVINO_FP32,
    OPENVINO_INT4,
    OPENVINO_INT8,
    Q4_0,
    Q4_K_M,
    Q8_0,
    Stack,
    measure_of,
    named,
    spec_of,
)
from optigpu.documents.result import Attribution
from optigpu.job.spec import JobSpec
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS, Report, write_picture
from optigpu.report.formats import NOT_VALID, Grid, columns, ratio, scaled, with_interval
from optigpu.report.formats import markdown as grid_markdown
from optigpu.report.rows import Row, heading, ladder_notes, origin_line, rows_of
from optigpu.vocabulary import Document

EAGER = Stack("torch float32")
"""The first stack of each job, and so its baseline: the model as transformers runs it."""
HYBRID = Stack("torch int8_hybrid", named("int8_hybrid"))
NATIVE = Stack("torch native_decode w4", named("native_decode", weights="w4"))
UNEVEN = Stack("torch native_decode w4k", named("native_decode", weights="w4k"))
UNCALIBRATED = Stack("torch native_decode w4", named("native_decode", weights="w4", calibration="none"))
"""Calibration gains nothing on random weights."""
EIGHT_BITS = (Q8_0, Q4_K_M, ONNX_INT8, OPENVINO_INT8)
"""One stack of each engine at least: the first eight variants of a job take turns with one another."""
FOUR_BITS = (ONNX_INT4, OPENVINO_INT4)
FLOATS = (ONNX_FP32, OPENVINO_FP32)


@dataclass(frozen=True)
class EngineCase:
    """One job. `budget_s` is how long it may measure; what is whole by then is kept.

    `replicates` and `seconds` are how many processes measure each stack, and each for how long at least.
    """

    model: str
    stacks: tuple[Stack, ...]
    budget_s: float
    new_tokens: int = 64
    replicates: int = 3
    seconds: float = 2.0
    meters: tuple[str, ...] = ()

    def spec(self) -> JobSpec:
        """The first stack's job, with the others beside it. Raises SpecError for a technique that there is not."""
        return spec_of(
            self.stacks,
            self.model,
            (32, self.new_tokens),
            name="engines side by side",
            measure=measure_of(self.replicates, self.seconds, *self.meters, text=TEXT, tokens=1000),
            limits={"timeout_s": self.budget_s, "max_variants": len(self.stacks)},
        )


CASES: dict[str, EngineCase] = {
    "tiny": EngineCase(
        "bundled:tiny",
        (EAGER, NATIVE, HYBRID, *EIGHT_BITS, *FOUR_BITS, *FLOATS),
        budget_s=360,
        seconds=1.0,
        meters=("quality",),
    ),
    "gpt2": EngineCase(
        "preset:gpt2", (EAGER, UNCALIBRATED, HYBRID, *EIGHT_BITS, *FOUR_BITS, *FLOATS), budget_s=420
    ),
    "small": EngineCase(
        "bundled:small",
        (EAGER, NATIVE, UNEVEN, Q4_K_M, IQ4_KS, *FOUR_BITS, Q4_0, IQ4_K, Q8_0),
        budget_s=300,
        seconds=1.0,
        meters=("quality",),
    ),
    # In float32 the other engines would need 5 GB each, and would show the memory's bandwidth alone.
    "llama-3.2-1b": EngineCase(
        "preset:llama-3.2-1b",
        (EAGER, UNCALIBRATED, *EIGHT_BITS, IQ4_KS, *FOUR_BITS),
        budget_s=720,
        new_tokens=32,
        replicates=2,
    ),
}
"""By the names of the files of results; together 30 minutes at most."""
FOLDER = Path("docs/results")
FIGURES = ("weight_bytes", "kld_mean", "top1_agreement", "perplexity")
"""What stands beside the speed."""
LEAST_ENGINES = 4
"""That a job must have valid figures of."""


def measured(case: EngineCase) -> dict[str, Any]:
    """The job's report as JSON, with what it was allowed and what it took."""
    load, started = os.getloadavg()[0], time.monotonic()
    report = run_shown(case.spec())
    about = {"load_before": load, "budget_s": case.budget_s, "seconds": time.monotonic() - started}
    return about | {"stopped": report.stopped} | report.document()


def markdown(document: Document, chart: str) -> str:
    """A job's table below its chart, the file `chart`."""
    budget = f"The job took {document['seconds']:.0f} s of the {document['budget_s']:g} s that it may take."
    stopped = [document["stopped"]] if document.get("stopped") else []
    lines = [f"## `{document['spec']['model']}`", "", f"![Speed over bytes and over divergence]({chart})", ""]
    return "\n".join([*lines, grid_markdown(grid_of(document)), " ".join([budget, *stopped]), ""])


def grid_of(document: Document) -> Grid:
    """A row for each engine's stack, the reason where there is no figure."""
    attribution = Attribution.model_validate(document["attribution"], extra="ignore")
    results = document["results"]
    rows = rows_of(attribution, results)
    headings = ("TTFT (ms):", "weights (MB):", "KLD (nat):", "top-1 (%):", "perplexity:")
    shown = [name for name in FIGURES if any(row.has_figure(name) for row in rows)]
    return Grid(
        title=job_title(document["spec"], results),
        columns=columns("variant", f"{heading(attribution.metric)}:", "speedup:", *headings, "status"),
        rows=tuple(_cells(row, attribution, shown) for row in rows),
        notes=(
            *ladder_notes(rows, attribution, [attribution.metric, *shown]),
            *filter(None, [origin_line(results)]),
        ),
    ).without_empty_columns()


def _cells(row: Row, attribution: Attribution, shown: Sequence[str]) -> tuple[str, ...]:
    """A figure that no row has is blank, so that its column goes."""
    primary = attribution.metric
    speed = with_interval(row.metric(primary))
    quality = {
        "kld_mean": with_interval(row.metric("kld_mean")),
        "top1_agreement": scaled(row.metric("top1_agreement"), 100.0),
        "perplexity": scaled(row.metric("perplexity"), 1.0),
    }
    status = str(row.ended.status) if row.result is None else "ok" if row.valid else "invalid"
    return (
        row.label + (" *" if row.ended.index == attribution.best else ""),
        speed if row.valid or not row.has_figure(primary) else speed + NOT_VALID,
        ratio(row.ended.speedup) if row.ended.speedup else "",
        scaled(row.metric("ttft_s"), 1e3),
        scaled(row.metric("weight_bytes"), 1e-6),
        *(text if name in shown else "" for name, text in quality.items()),
        status,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    budgets = ", ".join(f"{name} {case.budget_s:g}" for name, case in CASES.items())
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--convert", action="store_true", help="only write what the engines read")
    parser.add_argument(
        "--budget", type=float, help=f"seconds that each job may measure (default: {budgets})"
    )
    parser.add_argument("--replicates", type=int, help="processes of each variant")
    parser.add_argument("--seconds", type=float, help="the least time that each process is measured")
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="the folder for engines_MODEL.json and .svg"
    )
    parser.add_argument("--show", type=Path, nargs="+", help="print these files of results instead")
    return parser.parse_args()


def main() -> int:
    """Measures, converts or shows; the exit status is 0 if every job has four engines or more with a valid figure."""
    options = _options()
    if options.show:
        for path in options.show:
            print(markdown(json.loads(path.read_text()), path.with_suffix(".svg").name))
        return 0
    given = {"budget_s": options.budget, "replicates": options.replicates, "seconds": options.seconds}
    asked = {name: value for name, value in given.items() if value is not None}
    cases = {name: replace(CASES[name], **asked) for name in options.models}
    if options.convert:
        return convert([case.spec() for case in cases.values()])
    counts = []
    for name, case in cases.items():
        path, document = options.output / f"engines_{name}.json", measured(case)
        write(path, "engines", document)
        chart = path.with_suffix(".svg")
        attribution = Attribution.model_validate(document["attribution"], extra="ignore")
        results = document["results"]
        write_picture(
            CHARTS["pareto"](Report(job_title(document["spec"], results), results, attribution)), chart
        )
        print(markdown(document, chart.name))
        valid = (result["variant"]["backend"] for result in results if result["verdict"]["valid"])
        counts.append(len(set(valid)))
    return 0 if min(counts) >= LEAST_ENGINES else 1


if __name__ == "__main__":
    sys.exit(main())
