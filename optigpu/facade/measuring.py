"""run, ladder and leaderboard: jobs and boards as plain functions of a program or a notebook; and JobReport: what a job
found, to be read, tabulated, drawn and saved."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.client import Client
from optigpu.documents.events import as_document
from optigpu.documents.result import Attribution, AttributionRow, Result
from optigpu.documents.views import LeaderboardPage
from optigpu.facade.benchmark_result import Picture, Shown, drawn, frame
from optigpu.hardware import best_device, probe
from optigpu.job.plan import with_default_stack
from optigpu.job.spec import JobSpec
from optigpu.measure import Report
from optigpu.measure import run as measure
from optigpu.paths import saying
from optigpu.report.catalog import job_title
from optigpu.report.charts import Report as Drawn
from optigpu.report.formats import Grid, console
from optigpu.report.ladder import ladder_grid, ladder_records
from optigpu.report.leaderboard import leaderboard_grids, leaderboard_records
from optigpu.report.progress import RunProgress
from optigpu.techniques.base import Technique
from optigpu.variables import DEFAULT_URL
from optigpu.vocabulary import Document
from optigpu.workloads import WORKLOADS
from optigpu.workloads.base import Workload

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
        with saying(f"{file} cannot be written", "name a file in a folder that you may write"):
            file.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
        return file

    def __repr__(self) -> str:
        counted = ((len(self.rows), "variant"), (len(self.results), "result"))
        counts = ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counted)
        return f"JobReport({self.spec.workload.kind}: {counts})"


AskedWorkload = str | Mapping[str, object] | Workload
"""A workload by its kind with its usual shapes, or as in a job's JSON, `{"kind": ..., ...}`."""
AskedTechnique = str | Mapping[str, object] | Technique
"""A technique by its name with its usual parameters, or as in a job's JSON, `{"name": ..., ...}`."""


def run(
    workload: AskedWorkload = "generate",
    model: str | None = None,
    *,
    stack: Sequence[AskedTechnique] = (),
    progress: bool | None = None,
    **fields: object,
) -> JobReport:
    """Measures a job on this machine, each variant in processes of its own; this one loads no torch.

    `fields` are the others of a job's JSON: device, plan, measure, limits, beside, backend, seed, name, tags, note.
    Without a device it is CUDA where there is a GPU; without a model the workload's usual one. `progress` is shown on
    stderr, by default if that is a terminal.

    Raises SpecError with a line for each field that is wrong, and UnsupportedError where the device is missing. What
    fails later ends its own variant, with the reason in `rows`.

    >>> import optigpu
    >>> report = optigpu.run(
    ...     {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8},
    ...     "preset:tiny-llama-test",
    ...     stack=["int8_weight_only"],
    ...     device="cpu",
    ...     measure={"replicates": 1, "min_seconds": 0.2, "max_seconds": 1, "meters": ["latency", "memory"]},
    ...     limits={"wait_for_quiet_s": 0},
    ... )
    >>> (result,) = report.results
    >>> result.variant.label, result.metrics["weight_bytes"].unit
    ('int8_weight_only', 'B')
    """
    return measured(job_spec(workload, model, stack, fields), progress)


def ladder(
    workload: AskedWorkload = "generate",
    model: str | None = None,
    *,
    stack: Sequence[AskedTechnique] | None = None,
    progress: bool | None = None,
    **fields: object,
) -> JobReport:
    """As `run`, with the plan `ladder`: the baseline, each technique alone, and each prefix of the stack. Without a
    stack it takes the techniques that suit the device, and beside them those that exclude the others."""
    return measured(ladder_spec(workload, model, stack, fields), progress)


@dataclass(frozen=True, repr=False)
class Leaderboard(Shown):
    """Boards of a service's comparable results, one for each workload and model."""

    page: LeaderboardPage

    def grids(self) -> Sequence[Grid]:
        return leaderboard_grids(self.page)

    def to_frame(self) -> "DataFrame":
        """A row for each result, raw values in SI units. Raises UnsupportedError where pandas is not installed."""
        return frame(leaderboard_records(self.page))

    def __repr__(self) -> str:
        count = len(self.page.boards)
        return f"Leaderboard({count} board{'' if count == 1 else 's'})"


def leaderboard(
    url: str | None = None, *, api_key: str | None = None, **filters: str | float | bool | None
) -> Leaderboard:
    """The best results of a service, by the filters of `optigpu leaderboard`: metric, workload, model, hardware, ...
    Without `url` the service is the one that OPTIGPU_URL names, else one on this machine; the key is OPTIGPU_API_KEY's.
    Raises UnreachableError where none answers, and ServiceError for a filter that it does not know."""
    address = url or os.environ.get("OPTIGPU_URL", DEFAULT_URL)
    with Client(address, api_key or os.environ.get("OPTIGPU_API_KEY")) as client:
        return Leaderboard(client.leaderboard(**filters))


def job_spec(
    workload: AskedWorkload,
    model: str | None,
    stack: Sequence[AskedTechnique],
    fields: Mapping[str, object],
) -> JobSpec:
    """The job that `run` measures. Raises SpecError with a line for each field that is wrong."""
    asked = _named("kind", workload)
    kind = WORKLOADS.get(str(asked.get("kind")))
    if model is None and "models" not in fields and kind is not None and kind.task.needs_model:
        model = kind.example_model
    device = {} if "device" in fields else {"device": best_device()}
    techniques = [_named("name", each) for each in stack]
    return JobSpec.model_validate(
        {**device, **fields, "workload": asked, "model": model, "stack": techniques}
    )


def _named(key: str, asked: str | Mapping[str, object] | Workload | Technique) -> Mapping[str, object]:
    if isinstance(asked, str):
        return {key: asked}
    return asked.model_dump() if isinstance(asked, Workload | Technique) else asked


def ladder_spec(
    workload: AskedWorkload,
    model: str | None,
    stack: Sequence[AskedTechnique] | None,
    fields: Mapping[str, object],
) -> JobSpec:
    """The job that `ladder` measures. Raises SpecError with a line for each field that is wrong."""
    spec = job_spec(workload, model, stack or (), {**fields, "plan": "ladder"})
    return with_default_stack(spec, probe()) if stack is None else spec


def measured(spec: JobSpec, progress: bool | None) -> JobReport:
    """Runs a job; `progress` None shows it where stderr is a terminal."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return JobReport(measure(spec, lambda _: None))
    with RunProgress(console(stderr=True)) as shown:
        return JobReport(measure(spec, lambda event: shown.show(event.kind, as_document(event))))


def printed(spec: JobSpec, progress: bool | None) -> JobReport:
    report = measured(spec, progress)
    print(report)
    return report
