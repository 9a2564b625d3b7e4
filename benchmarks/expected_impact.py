"""`python -m benchmarks.expected_impact`: the nine rows of the founding table of expected impact, measured on this CPU.

Every row is one job or more, in which a technique and what it is compared with take turns. What cannot be measured is
null, with the reason. --show prints the rows of a file as Markdown, beside their claims.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.document import write
from benchmarks.impact_rows import ROWS, Asked, Question, Row, prepare
from optigpu.claims import baselines
from optigpu.documents.result import Gain, Result
from optigpu.measure import Report, run
from optigpu.report import console
from optigpu.vocabulary import Document, OptiGPUError

BYTES = ("weight_bytes", "peak_bytes")
QUALITY = ("kld_mean", "top1_agreement", "perplexity")


@dataclass(frozen=True)
class Figure:
    """What one comparison came to: the ratio of speeds with its interval, shares of the reference's bytes, quality.

    `reasons` say why the ratio does not hold, or why there is none.
    """

    what: str
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    weight_bytes: float | None = None
    peak_bytes: float | None = None
    kld_mean: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None
    reasons: tuple[str, ...] = ()


def figures_of(row: Row, asked: Asked) -> list[Figure]:
    """All comparisons of a row; a job that fails is a figure with the reason."""
    try:
        questions = row.questions(asked)
    except OptiGPUError as error:
        return [Figure(row.name, reasons=(str(error),))]
    found: list[Figure] = []
    for question in questions:
        found += _answers(question)
    return found


def _answers(question: Question) -> list[Figure]:
    if question.spec is None:
        return [Figure(question.what, reasons=(question.reason or "",))]
    try:
        report = run(question.spec, on_event=lambda _: None)
    except OptiGPUError as error:
        return [Figure(question.what, reasons=(str(error),))]
    return list(answers_of(question.what, report))


def answers_of(what: str, report: Report) -> Iterator[Figure]:
    """The variants of a job that were compared with another."""
    results = {outcome.index: outcome.result for outcome in report.outcomes if outcome.result}
    for row in report.attribution.rows:
        label = what if row.label in what else f"{what}: {row.label}"
        if row.reason is not None:
            yield Figure(label, reasons=(row.reason,))
        elif row.speedup is not None:
            yield _figure(label, row.speedup, results[row.index], results[row.speedup.compared_with])


def _figure(what: str, gain: Gain, result: Result, reference: Result) -> Figure:
    def share(metric: str) -> float | None:
        mine, whole = value(result, metric), value(reference, metric)
        return mine / whole if mine is not None and whole else None

    return Figure(
        what,
        gain.ratio,
        gain.ci,
        share("weight_bytes"),
        share("peak_bytes"),
        value(result, "kld_mean"),
        value(result, "top1_agreement"),
        value(result, "perplexity"),
        tuple(str(reason) for reason in gain.reasons),
    )


def value(result: Result, metric: str) -> float | None:
    """A figure of a result; None where it was not measured."""
    found = result.metrics.get(metric)
    return None if found is None else found.value


def markdown(document: Document) -> str:
    """The rows as lines of a table: technique, claims, what was measured."""
    lines = ["| technique | claims | measured here |", "| --- | --- | --- |"]
    for row in document["rows"]:
        cells = "; ".join(_said(figure) for figure in row["figures"])
        lines.append(f"| {row['name']} | {_claimed(row['claims'])} | {cells} |")
    return "\n".join(lines) + "\n"


def _claimed(ids: str) -> str:
    claims = [claim for claim in baselines().claims if claim.id == ids or claim.id.startswith(f"{ids}-")]
    said = (
        f"{claim.metric} {claim.value:g}{f' to {claim.to:g}' if claim.to else ''} {claim.unit}"
        for claim in claims
    )
    return ", ".join(said)


def _said(figure: Document) -> str:
    if figure["ratio"] is None:
        return f"{figure['what']}: null: {' '.join(figure['reasons'])}"
    interval = "" if figure["ci"] is None else " [{:.2f}, {:.2f}]".format(*figure["ci"])
    parts = [f"{figure['what']}: {figure['ratio']:.2f}x{interval}"]
    parts += [f"{figure[name]:.1%} of the {name.replace('_', ' ')}" for name in BYTES if figure[name]]
    parts += [f"{name} {figure[name]:.4g}" for name in QUALITY if figure[name] is not None]
    parts += [f"not valid: {reason}" for reason in figure["reasons"]]
    return ", ".join(parts)


def measured(rows: Sequence[Row], replicates: int) -> Iterator[Document]:
    """The rows as JSON, each when it is measured."""
    with tempfile.TemporaryDirectory(prefix="optigpu-impact-") as folder:
        asked = Asked(replicates, Path(folder))
        prepare(asked)
        for row in track(rows, "measuring", console=console(stderr=True)):
            figures = [asdict(figure) for figure in figures_of(row, asked)]
            yield {"name": row.name, "claims": row.claims, "figures": figures}


def main() -> int:
    """Measures, or prints what was; the exit status is 0 if every row has a figure that holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expected_impact", description=__doc__)
    names = [row.claims.removeprefix("impact-") for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--replicates", type=int, default=3, help="processes of each variant")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print the rows of this file instead")
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.show.read_text())), end="")
        return 0
    load = os.getloadavg()[0]
    wanted = [row for row in ROWS if row.claims.removeprefix("impact-") in options.rows]
    rows: list[Document] = []
    for row in measured(wanted, options.replicates):
        rows.append(row)
        if options.output:  # after each, so that an interruption loses one row
            write(options.output, "expected_impact", {"load_before": load, "rows": rows})
    print(markdown({"rows": rows}), end="")
    held = [any(each["ratio"] and not each["reasons"] for each in row["figures"]) for row in rows]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
