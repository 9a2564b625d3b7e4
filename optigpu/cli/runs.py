"""The commands `runs`, `show`, `export`, `import`, `chart`, `charts`, `compare` and `replay`: reports that `run` and
`ladder` kept, and jobs and results of a service."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from optigpu.cli.measuring import Stop, stoppable
from optigpu.cli.options import Given
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_job, show_list
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.documents.fields import read_json
from optigpu.vocabulary import Document, SpecError, is_id

if TYPE_CHECKING:
    from optigpu.documents.views import Comparison
    from optigpu.job.spec import JobSpec
    from optigpu.measure import Report
    from optigpu.runs import KeptRun


Which = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help='The id of a kept run or its end, "last", a file, or the id of a job at the service.',
    ),
]


def runs(
    limit: Annotated[int, typer.Option(min=1)] = 20,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """List the runs that are kept on this machine, the newest first."""
    from itertools import islice

    from optigpu.report.catalog import runs_grid
    from optigpu.runs import folder, kept_runs

    newest = [run.summary for run in islice(kept_runs(), limit)]
    if not newest and format_ is OutputFormat.TABLE:
        echo(f"No run is kept in {folder()} yet; `optigpu run` and `optigpu ladder` keep theirs there.")
        return
    show_list(runs_grid(newest), newest, newest, format_)


def show(
    which: Which,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where the run's time went.")] = False,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show a kept run again, or a job of a service: as a table, Markdown, CSV, LaTeX or JSON."""
    run = find_run(which, url, api_key)
    if timeline:
        _show_timeline(run, format_)
    else:
        show_job(run.document, run.attribution, format_)
    if run.stopped:
        echo(run.stopped, err=True)


def _show_timeline(run: "KeptRun", form: OutputFormat) -> None:
    from optigpu.report.catalog import job_title
    from optigpu.report.charts.timeline import NO_TIMELINE, timeline_grid

    if not run.timeline:
        raise SpecError(NO_TIMELINE)
    spans = [span.model_dump(mode="json") for span in run.timeline]
    labels = {row.index: row.label for row in run.attribution.rows}
    show_list(timeline_grid(job_title(run.spec, run.results), run.timeline, labels), spans, spans, form)


def export(
    which: Which,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .zip.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Write a run as one ZIP file: request, results, raw samples, artifacts, tables, figures, methods, citation."""
    from optigpu.report.bundle import Contents, write_bundle

    if output.suffix.lower() != ".zip":
        raise SpecError(f"{output} must end with .zip, the format of bundles.")
    run = find_run(which, url, api_key)
    files = (run.samples, run.artifacts) if _is_kept(which) else _files_at_the_service(run, url, api_key)
    write_bundle(Contents(run.spec, run.results, run.attribution, *files), output)
    echo(str(output))


def import_(
    which: Which,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Enter a run that is kept here into a service, as a job that has ended, and print the job's id.

    What is in a file of another tool (GuideLLM, AIPerf, vllm bench serve, llama-benchy, llama-bench, optimum-benchmark,
    lm-eval) is listed apart, without a rank; --format is of the figures that were taken.
    """
    from optigpu.others.formats import read
    from optigpu.report.others import others_grid
    from optigpu.runs import find

    others = read(Path(which)) if os.path.isfile(which) else None
    with connect(url, api_key) as client:
        if others is None:
            echo(client.import_run(find(which).document).id)
            return
        document = client.import_others(others).model_dump(mode="json")
    lines = [{"label": row.label, **figure.model_dump()} for row in others.rows for figure in row.figures]
    show_list(others_grid(others, left_out=True), lines, document, format_)


def _files_at_the_service(
    run: "KeptRun", url: str, api_key: str | None
) -> tuple[dict[str, Document], dict[str, dict[str, bytes]]]:
    """The raw samples and artifacts of a job's results, by the result's id."""
    samples: dict[str, Document] = {}
    artifacts: dict[str, dict[str, bytes]] = {}
    with connect(url, api_key) as client:
        for result in (str(each["id"]) for each in run.results):
            samples[result] = client.samples(result).model_dump(mode="json")["samples"]
            kept = [each.name for each in client.artifacts(result).artifacts if each.sha256]
            artifacts[result] = {name: client.artifact(result, name) for name in kept}
    return samples, artifacts


def find_run(which: str, url: str, api_key: str | None) -> "KeptRun":
    """A run that is kept here, else the service's job of that id. Raises SpecError, or ServiceError."""
    from optigpu.runs import KeptRun, find

    if _is_kept(which):
        return find(which)
    with connect(url, api_key) as client:
        job = client.job(which)
        if job.attribution is None:
            raise SpecError(
                f"The job is {job.state} and has no table yet; `optigpu watch {which}` follows it."
            )
        document = {
            "id": job.id,
            "created_at": job.created_at.isoformat(),
            "spec": job.spec,
            "results": client.results(job.id),
            "attribution": job.attribution,
            "stopped": job.reason,
        }
    return KeptRun(Path(which), document)


def _is_kept(which: str) -> bool:
    """Whether a run is meant that lies here: anything but the id of one that does not."""
    from optigpu.runs import folder

    return not is_id(which) or (folder() / f"{which}.json").is_file()


Kind = Literal[
    "ladder", "roofline", "quality", "precision", "overview", "lengths", "batches", "loads", "pareto",
    "bits", "waterfall", "baselines", "timeline",
]  # fmt: skip


def chart(
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help='What to draw in one chart: ids of kept runs or their ends, "last", files, or jobs of a service.',
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .svg or .png.")],
    kind: Annotated[Kind, typer.Option(help="Which chart to draw.")] = "ladder",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Draw results: each variant's speed, its place under the roofline, speed against quality or bytes."""
    from optigpu.report.catalog import combined
    from optigpu.report.charts import CHARTS, Report, write_picture

    found = [find_run(name, url, api_key) for name in which]
    title, results = combined([run.document for run in found])
    own = (found[0].attribution, found[0].timeline) if len(found) == 1 else ()
    write_picture(CHARTS[kind](Report(title, results, *own)), output)
    echo(str(output))


def charts(
    which: Which,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to; it is made if needed.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Draw every chart that a run has the figures for, as SVG and PNG, with the data beside them as JSON."""
    from optigpu.report.catalog import combined
    from optigpu.report.charts import Report, write_charts

    run = find_run(which, url, api_key)
    title, results = combined([run.document])
    for each in write_charts(Report(title, results, run.attribution, run.timeline), out):
        for file in each.files:
            echo(str(file))
        if each.reason:
            echo(f"{each.name}: not drawn. {each.reason}", err=True)


Place = Annotated[
    str,
    typer.Argument(
        help="The id of a result at the service, or FILE or FILE#LABEL of what `optigpu run --format json` wrote."
    ),
]


class Stored(NamedTuple):
    """A stored result, and the request of its job if known."""

    result: Document
    spec: Document | None


def compare(
    baseline: Place,
    candidate: Place,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Compare even where workload or hardware differ; notes name the differences."
        ),
    ] = False,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Compare two results: each metric's ratio, its interval, and whether the difference is real."""
    from optigpu.report.leaderboard import comparison_grid
    from optigpu.statistics.compare import compare as compare_results

    pair = [stored_result(place, url, api_key).result for place in (baseline, candidate)]
    comparison = compare_results(*pair, anyway=anyway)
    document = comparison.model_dump(mode="json")
    show_list(comparison_grid(comparison), _lines(comparison), document, format_)


def _lines(comparison: "Comparison") -> list[Document]:
    """A line for each metric."""
    return [{"metric": name} | metric.model_dump(mode="json") for name, metric in comparison.metrics.items()]


def replay(
    given: Given,
    result: Place,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Measure a stored result's variant again on this machine and compare speed, environment and software.

    Without flags it is measured as it was then. With --format json, what `run` prints with it, and the comparison.
    """
    from optigpu.cli.flags import read_flags, section_flags
    from optigpu.job.measured import replay_note
    from optigpu.report.leaderboard import comparison_grid
    from optigpu.statistics.compare import compare as compare_results

    stored = stored_result(result, url, api_key)
    changes = {section: read_flags(section_flags(section), given) for section in ("measure", "limits")}
    with stoppable() as stop:
        report = _run(_request(stored, changes), stop)
    document = report.document()
    (new,) = document["results"]
    comparison = compare_results(stored.result, new, anyway=True)
    if note := replay_note(stored.result, new):
        comparison = comparison.model_copy(update={"notes": (note, *comparison.notes)})
    document["comparison"] = comparison.model_dump(mode="json")
    show_list(comparison_grid(comparison), _lines(comparison), document, format_)
    if report.cancelled:
        raise typer.Exit(stop.status)


def stored_result(place: str, url: str, api_key: str | None) -> Stored:
    """The result that an id or a file names. Raises SpecError if a file holds none, and ServiceError."""
    if not is_id(place):
        name, _, label = (place, "", "") if os.path.exists(place) else place.partition("#")
        return _from_file(name, label)
    with connect(url, api_key) as client:
        result = client.result(place)
        job_id = result.get("job_id")
        return Stored(result, client.job(job_id).spec if job_id else None)


def _from_file(name: str, label: str) -> Stored:
    """The result with that label, or the only one."""
    try:
        document = read_json(Path(name))
    except SpecError as error:
        if isinstance(error.__cause__, OSError):
            why = error.__cause__.strerror
            raise SpecError(f"{name} is neither the id of a result nor a readable file: {why}.") from error
        raise
    results = document.get("results", [document]) if isinstance(document, dict) else []
    if not isinstance(results, list) or not results or not all(map(_is_result, results)):
        raise SpecError(f"{name} holds no result; give a file that `optigpu run --format json` wrote.")
    labels = [result["variant"]["label"] for result in results]
    chosen = [result for result in results if label in ("", result["variant"]["label"])]
    if len(chosen) != 1:
        found = f"{len(chosen)} results labelled {label!r}" if label else f"{len(chosen)} results"
        raise SpecError(f"{name} holds {found}; choose one with {name}#LABEL: {', '.join(labels)}.")
    return Stored(chosen[0], document.get("spec") if isinstance(document, dict) else None)


def _is_result(document: object) -> bool:
    """Whether the document has the parts that are read here and in `replay_request`."""
    if not isinstance(document, dict) or not isinstance(document.get("variant"), dict):
        return False
    parts = {"label", "workload", "model", "backend", "device", "stack", "variant_digest"}
    return {"seed", "schema_version"} <= document.keys() and parts <= document["variant"].keys()


def _request(stored: Stored, changes: Mapping[str, Document]) -> "JobSpec":
    """The job that measures the result again, with changes of its sections `measure` and `limits`."""
    from optigpu.cli.options import validated
    from optigpu.job.measured import replay_request

    request = replay_request(stored.result, stored.spec, changes["measure"])
    try:
        return validated(request | {"limits": {**request["limits"], **changes["limits"]}})
    except SpecError as error:
        raise SpecError(f"This version cannot measure the result again:\n{error}") from error


def _run(spec: "JobSpec", stop: Stop) -> "Report":
    """Runs the job with progress on stderr. Exit status 1 if there is no result, and that of `stop` if it asked."""
    from optigpu.documents.events import as_document
    from optigpu.measure import run
    from optigpu.report.formats import console
    from optigpu.report.progress import RunProgress

    with RunProgress(console(stderr=True)) as progress:
        report = run(spec, lambda event: progress.show(event.kind, as_document(event)), cancelled=stop)
    for outcome in report.outcomes:
        if outcome.result is None:
            echo(f"The result was not measured again: {outcome.status}: {outcome.reason}", err=True)
            raise typer.Exit(stop.status if report.cancelled else 1)
    if report.stopped:
        echo(report.stopped, err=True)
    return report
