"""The commands `runs`, `show`, `export`, `import`, `chart` and `charts`: reports that `run` and `ladder` kept, and jobs
of a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.output import FormatOption, OutputFormat, echo, show_job, show_list
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.vocabulary import Document, SpecError, is_id

if TYPE_CHECKING:
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

    from optigpu.report import runs_grid
    from optigpu.runs import folder, kept_runs

    newest = [run.summary for run in islice(kept_runs(), limit)]
    if not newest and format_ is OutputFormat.TABLE:
        echo(f"No run is kept in {folder()} yet; `optigpu run` and `optigpu ladder` keep theirs there.")
        return
    show_list(runs_grid(newest), newest, newest, format_)


def show(
    which: Which,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show a kept run again, or a job of a service: as a table, Markdown, CSV, LaTeX or JSON."""
    run = find_run(which, url, api_key)
    show_job(run.document, run.attribution, format_)
    if run.stopped:
        echo(run.stopped, err=True)


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


def import_(which: Which, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Enter a run that is kept here into a service, as a job that has ended, and print the job's id."""
    from optigpu.runs import find

    with connect(url, api_key) as client:
        echo(client.import_run(find(which).document).id)


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
    "ladder", "roofline", "quality", "throughput", "precision", "overview", "lengths", "batches", "loads", "pareto",
    "bits", "waterfall", "comparison", "baselines", "architecture",
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
    """Draw results: each variant's speed, its place under the roofline, speed against quality or against latency."""
    from optigpu.report.catalog import combined
    from optigpu.report.charts import CHARTS

    found = [find_run(name, url, api_key) for name in which]
    title, results = combined([run.document for run in found])
    CHARTS[kind](title, results, output, found[0].attribution if len(found) == 1 else None)
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
    for each in write_charts(Report(title, results, run.attribution), out):
        for file in each.files:
            echo(str(file))
        if each.reason:
            echo(f"{each.name}: not drawn. {each.reason}", err=True)
