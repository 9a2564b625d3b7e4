"""JobReport: what a job found, to be read, tabulated, drawn and saved."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.documents.result import Attribution, AttributionRow, Result
from optigpu.facade.shown import Picture, Shown, drawn, frame
from optigpu.job.spec import JobSpec
from optigpu.measure import Report
from optigpu.report import Grid, ladder_grid, ladder_records
from optigpu.report.catalog import job_title
from optigpu.report.charts import Report as Drawn
from optigpu.vocabulary import Document, OptiGPUError

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class JobReport(Shown):
    """The report of a job with its tables and charts.

    >>> import optigpu
    >>> report = optigpu.run(
    ...     {"kind": "matmul", "sizes": [32]},
    ...     device="cpu",
    ...     measure={"replicates": 1, "min_seconds": 0.1, "max_seconds": 1, "meters": ["latency"]},
    ...     limits={"wait_for_quiet_s": 0},
    ... )
    >>> report
    JobReport(matmul: 1 variant, 1 result)
    >>> [row.label for row in report.rows]
    ['baseline']
    >>> report.plot("ladder", "matmul.svg")
    Picture(matmul.svg)
    """

    report: Report

    @property
    def spec(self) -> JobSpec:
        return self.report.spec

    @property
    def results(self) -> tuple[Result, ...]:
        return self.report.results

    @property
    def attribution(self) -> Attribution:
        return self.report.attribution

    @property
    def rows(self) -> tuple[AttributionRow, ...]:
        """Every variant in the order of the plan: how it ended, and its gains."""
        return self.attribution.rows

    @property
    def best(self) -> Result | None:
        """The fastest valid variant's; None where none is valid."""
        return next((each for each in self.results if each.variant.index == self.attribution.best), None)

    @property
    def stopped(self) -> str | None:
        """Why the job ended before everything was measured; None if it did not."""
        return self.report.stopped

    @cached_property
    def _documents(self) -> list[Document]:
        return [result.model_dump(mode="json") for result in self.results]

    @property
    def _title(self) -> str:
        return job_title(self.spec.model_dump(mode="json"), self._documents)

    def document(self) -> Document:
        """The report as plain JSON, without raw samples: what `optigpu run --format json` prints."""
        return self.report.document()

    def grids(self) -> Sequence[Grid]:
        return (ladder_grid(self._title, self.attribution, self._documents),)

    def to_frame(self) -> "DataFrame":
        """A row for each variant, raw values in SI units. Raises UnsupportedError where pandas is not installed."""
        return frame(ladder_records(self.attribution, self._documents))

    def plot(self, kind: str = "ladder", path: str | Path | None = None) -> Picture:
        """A chart of the results, which a notebook shows; written to `path` (.svg or .png) if that is given. Raises
        SpecError for an unknown kind, and where the results have nothing that such a chart shows."""
        return drawn(kind, Drawn(self._title, self._documents, self.attribution), path)

    def save(self, path: str | Path) -> Path:
        """Writes `document()` as JSON; `optigpu show FILE` reads it. Raises OptiGPUError if that is not possible."""
        file = Path(path)
        try:
            file.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptiGPUError(
                f"{file} cannot be written ({error.strerror}); name a file in a folder that you may write."
            ) from error
        return file

    def __repr__(self) -> str:
        counted = ((len(self.rows), "variant"), (len(self.results), "result"))
        counts = ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counted)
        return f"JobReport({self.spec.workload.kind}: {counts})"
