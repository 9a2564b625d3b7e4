"""The commands `runs` and `show`: reports that `run` and `ladder` kept."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.output import AsJson, FormatOption, OutputFormat, show_grid, show_job
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.vocabulary import is_id

if TYPE_CHECKING:
    from optigpu.runs import KeptRun

Which = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help='The id of a kept run or its end, "last", a file, or the id of a job at the service.',
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(runs)
    app.command()(show)


def runs(limit: Annotated[int, typer.Option(min=1)] = 20, json_: AsJson = False) -> None:
    """List the runs that are kept on this machine, the newest first."""
    from itertools import islice

    from optigpu.report import runs_grid
    from optigpu.runs import folder, kept_runs

    newest = [run.summary for run in islice(kept_runs(), limit)]
    if json_:
        typer.echo(json.dumps(newest, indent=2))
    elif newest:
        show_grid(runs_grid(newest), OutputFormat.TABLE)
    else:
        typer.echo(f"No run is kept in {folder()} yet; `optigpu run` and `optigpu ladder` keep theirs there.")


def show(
    which: Which,
    format_: FormatOption = OutputFormat.TABLE,
    json_: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show a kept run again, or a job of a service: as a table, Markdown, CSV, LaTeX or JSON."""
    run = find_run(which, url, api_key)
    show_job(run.document, run.attribution, OutputFormat.JSON if json_ else format_)
    if run.stopped:
        typer.echo(run.stopped, err=True)


def find_run(which: str, url: str, api_key: str | None) -> "KeptRun":
    """A run that is kept here, else the service's job of that id. Raises SpecError, or ServiceError."""
    from pathlib import Path

    from optigpu.runs import KeptRun, find, folder

    if not is_id(which) or (folder() / f"{which}.json").is_file():
        return find(which)
    with connect(url, api_key) as client:
        job = client.job(which)
        document = {
            "id": job.id,
            "created_at": job.created_at.isoformat(),
            "spec": job.spec,
            "results": client.results(job.id),
            "attribution": job.attribution,
            "stopped": job.reason,
        }
    return KeptRun(Path(), document)
