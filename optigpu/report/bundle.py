"""A run as one ZIP file with everything that a paper or a colleague needs: figures, raw samples, tables, a citation."""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from optigpu.documents.result import Attribution
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS
from optigpu.report.formats import latex, markdown
from optigpu.report.ladder import ladder_csv, ladder_grid
from optigpu.report.methods import citation, methods
from optigpu.vocabulary import Document, OptiGPUError, SpecError

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
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, data in _files(contents):
                bundle.writestr(name, data)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise OptiGPUError(
            f"{path} cannot be written ({error.strerror}); free space there, or name another file."
        ) from error


def _files(contents: Contents) -> Iterator[tuple[str, str | bytes]]:
    title = job_title(contents.spec, contents.results)
    grid = ladder_grid(title, contents.attribution, contents.results)
    yield "spec.json", _json(contents.spec)
    yield "results.json", _json(_report(contents))
    yield "samples.json", _json(contents.samples)
    yield "environment.json", _json(_environments(contents.results))
    yield "table.md", markdown(grid)
    yield "table.tex", latex(grid)
    yield "table.csv", ladder_csv(contents.attribution, contents.results)
    yield "methods.txt", methods(contents.spec, contents.results) + "\n"
    yield "CITATION.cff", citation(contents.results)
    yield from _figures(title, contents.results)
    for result, files in contents.artifacts.items():
        for name, data in files.items():
            yield f"artifacts/{result}/{name}", data


def _figures(title: str, results: list[Document]) -> Iterator[tuple[str, bytes]]:
    """Nothing where no result has a figure to draw."""
    with TemporaryDirectory() as folder, suppress(SpecError):
        for name in FIGURES:
            CHARTS["ladder"](title, results, Path(folder) / name)
            yield name, (Path(folder) / name).read_bytes()


def _report(contents: Contents) -> Document:
    """What `optigpu run --format json` prints."""
    attribution = contents.attribution.model_dump(mode="json")
    return {"spec": contents.spec, "results": contents.results, "attribution": attribution}


def _environments(results: list[Document]) -> Document:
    """Each machine and software that a result was measured with, by the result's id."""
    return {result["id"]: result["environment"] for result in results}


def _json(document: object) -> str:
    return json.dumps(document, indent=2) + "\n"
