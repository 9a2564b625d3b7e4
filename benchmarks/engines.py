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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from benchmarks.engine_cases import CASES, EngineCase
from benchmarks.pairs import session_of
from optigpu.child.messages import Ready
from optigpu.conductor.outcome import builds_of
from optigpu.conductor.processes.asking import ask
from optigpu.documents.events import Event, as_document
from optigpu.documents.result import Attribution
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.quality.text import DATASETS_DIR
from optigpu.report import Column, Grid, RunProgress, console, job_title
from optigpu.report import markdown as grid_markdown
from optigpu.report.charts import CHARTS
from optigpu.report.notes import ladder_notes
from optigpu.report.numbers import NOT_VALID, ratio, scaled, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import Row, heading, rows_of
from optigpu.vocabulary import Document, OptiGPUError

FOLDER = Path("docs/results")
TEXTS = Path(__file__).resolve().parents[1] / "tests" / "text"
"""Has a part of WikiText-2, where the variable of the datasets names no other folder."""
FIGURES = ("weight_bytes", "kld_mean", "top1_agreement", "perplexity")
"""What stands beside the speed."""
LEAST_ENGINES = 4
"""That a job must have valid figures of."""
HEADINGS = ("TTFT (ms)", "weights (MB)", "KLD (nat)", "top-1 (%)", "perplexity")


def measured(case: EngineCase) -> dict[str, Any]:
    """The job's report as JSON, with what it was allowed and what it took."""
    os.environ.setdefault(DATASETS_DIR, str(TEXTS))
    load, started = os.getloadavg()[0], time.monotonic()
    with RunProgress(console(stderr=True)) as progress:

        def show(event: Event) -> None:
            progress.show(event.kind, as_document(event))

        report = run(case.spec(), show)
    about = {"load_before": load, "budget_s": case.budget_s, "seconds": time.monotonic() - started}
    return about | {"spent": report.spent, "stopped": report.stopped} | report.document()


def convert(spec: JobSpec) -> Iterator[str]:
    """Has each variant's process load its model once, which writes what its engine reads; yields why one cannot.

    What a job says of the engine's library is counted as well, and kept: it takes seconds to a minute.
    """
    variants = variants_of(spec)
    with session_of(spec, variants=len(variants)) as session:
        for variant in track(variants, f"converting {spec.model}", console=console(stderr=True)):
            try:
                with session.child(variant) as child:
                    ready = ask(child, session.assignment(variant, 0), Ready, session.progress)
                builds_of(variant, session.environment, ready.facts)
            except OptiGPUError as error:
                yield f"{variant.label}: {error}"


def draw(document: Document, path: Path, kind: str = "pareto") -> None:
    """A chart of a job."""
    results = document["results"]
    attribution = Attribution.model_validate(document["attribution"], extra="ignore")
    CHARTS[kind](job_title(document["spec"], results), results, path, attribution)


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
    names = ("variant", heading(attribution.metric), "speedup", *HEADINGS, "status")
    shown = [name for name in FIGURES if any(row.has_figure(name) for row in rows)]
    return Grid(
        title=job_title(document["spec"], results),
        columns=tuple(Column(name, right=name not in ("variant", "status")) for name in names),
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
    return (
        row.label + (" *" if row.ended.index == attribution.best else ""),
        speed if row.valid or not row.has_figure(primary) else speed + NOT_VALID,
        ratio(row.ended.speedup) if row.ended.speedup else "",
        scaled(row.metric("ttft_s"), 1e3),
        scaled(row.metric("weight_bytes"), 1e-6),
        *(text if name in shown else "" for name, text in quality.items()),
        _status(row),
    )


def _status(row: Row) -> str:
    if row.result is None:
        return str(row.ended.status)
    return "ok" if row.valid else "invalid"


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


def _asked(case: EngineCase, options: argparse.Namespace) -> EngineCase:
    given = {"budget_s": options.budget, "replicates": options.replicates, "seconds": options.seconds}
    return replace(case, **{name: value for name, value in given.items() if value is not None})


def main() -> int:
    """Measures, converts or shows; the exit status is 0 if every job has four engines or more with a valid figure."""
    options = _options()
    if options.show:
        for path in options.show:
            print(markdown(json.loads(path.read_text()), path.with_suffix(".svg").name))
        return 0
    cases = {name: _asked(CASES[name], options) for name in options.models}
    if options.convert:
        problems = [problem for case in cases.values() for problem in convert(case.spec())]
        print("\n".join(problems) or "All engines have their files.")
        return 0
    counts = []
    for name, case in cases.items():
        path = options.output / f"engines_{name}.json"
        document = measured(case)
        write(path, "engines", document)
        draw(document, path.with_suffix(".svg"))
        print(markdown(document, path.with_suffix(".svg").name))
        counts.append(len(engines_of(document)))
    return 0 if min(counts) >= LEAST_ENGINES else 1


def engines_of(document: Document) -> set[str]:
    """The backends that have a valid result."""
    return {str(result["variant"]["backend"]) for result in document["results"] if result["verdict"]["valid"]}


if __name__ == "__main__":
    sys.exit(main())
