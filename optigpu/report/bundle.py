"""A run as one ZIP file with everything that a paper or a colleague needs: figures, raw samples, tables, a citation."""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from optigpu.documents.result import Attribution
from optigpu.documents.versions import facts_of
from optigpu.paths import draft_of, saying
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS, Report, write_picture
from optigpu.report.formats import latex, markdown
from optigpu.report.ladder import ladder_csv, ladder_grid
from optigpu.report.rows import origin_line, took_turns
from optigpu.vocabulary import Document, SpecError

FIGURES = ("figure.svg", "figure.png")


@dataclass(frozen=True)
class Contents:
    """What a bundle is made of. `samples` and `artifacts` are by the result's id, then by metric or file name."""

    spec: Document
    results: list[Document]
    attribution: Attribution
    samples: Mapping[str, Document] = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)


def write_bundle(contents: Contents, path: Path) -> None:
    """Writes the ZIP file, whole or not at all. Raises OptiGPUError where that is not possible."""
    with (
        saying(f"{path} cannot be written", "free space there, or name another file"),
        draft_of(path) as draft,
        zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as bundle,
    ):
        for name, data in _files(contents):
            bundle.writestr(name, data)


def _files(contents: Contents) -> Iterator[tuple[str, str | bytes]]:
    title = job_title(contents.spec, contents.results)
    grid = ladder_grid(title, contents.attribution, contents.results)
    yield "spec.json", _json(contents.spec)
    attribution = contents.attribution.model_dump(mode="json")  # as `optigpu run --format json` prints it
    report = {"spec": contents.spec, "results": contents.results, "attribution": attribution}
    yield "results.json", _json(report)
    yield "samples.json", _json(contents.samples)
    yield "environment.json", _json({result["id"]: result["environment"] for result in contents.results})
    yield "table.md", markdown(grid)
    yield "table.tex", latex(grid)
    yield "table.csv", ladder_csv(contents.attribution, contents.results)
    yield "methods.txt", methods(contents.spec, contents.results) + "\n"
    yield "CITATION.cff", citation(contents.results)
    with TemporaryDirectory() as folder, suppress(SpecError):  # where no result has a figure to draw
        for name in FIGURES:
            write_picture(CHARTS["ladder"](Report(title, contents.results)), Path(folder) / name)
            yield name, (Path(folder) / name).read_bytes()
    for result, files in contents.artifacts.items():
        for name, data in files.items():
            yield f"artifacts/{result}/{name}", data


def _json(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"


def methods(spec: Document, results: Sequence[Document]) -> str:
    """How the results of a job were measured, in a few sentences for a paper's section on methods."""
    measure = spec["measure"]
    count, replicates = len(results), measure["replicates"]
    together = any(len(facts_of(result).get("side_by_side") or ()) > 1 for result in results)
    turns = " in turns with the other variants" if together else ""
    sentences = (
        f"{_counted(count, 'variant')} {'was' if count == 1 else 'were each'} measured in "
        f"{_counted(replicates, 'process')} of its own{turns}, for {measure['min_seconds']:g} to "
        f"{measure['max_seconds']:g} s of timed requests after requests had become steady.",
        "A figure is the median over the requests of a process, averaged over the processes (geometric mean).",
        f"Intervals are 95% by Student's t on the logarithms of the processes' medians; {_of_ratios(results)}."
        if replicates > 1
        else "Intervals are 95% of the one process that was measured, and do not show how processes differ.",
        "Rounds that other processes, the hypervisor, a quota or heat disturbed were set aside where enough others "
        "were clean; otherwise the interval reaches as far as the disturbance can have cost.",
        origin_line(results) or "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _of_ratios(results: Sequence[Document]) -> str:
    """What the intervals of ratios come from."""
    if any(map(took_turns, results)):
        return (
            "the ratio of variants that took turns is the Hodges-Lehmann estimate over turns that followed each other, "
            "for each pair of processes, and its interval is over these pairs"
        )
    return "those of ratios are paired where variants took turns"


def _counted(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def citation(results: Sequence[Document]) -> str:
    """A citation of the software that measured, in the Citation File Format."""
    environment = results[0]["environment"] if results else {}
    version = (environment.get("software") or {}).get("optigpu", "unknown")
    lines = [
        "cff-version: 1.2.0",
        "message: If you use these results, please cite the software that measured them.",
        "title: OptiGPU",
        "type: software",
        "authors:",
        "  - name: The OptiGPU maintainers",
        f'version: "{version}"',
    ]
    if environment.get("git_revision"):
        lines.append(f"commit: {environment['git_revision']}")
    return "\n".join(lines) + "\n"
