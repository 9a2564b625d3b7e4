"""Commands that talk to a service: submit, watch, jobs, cancel, withdraw."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flagged import Given, add_flagged, job_panels
from optigpu.cli.options import SpecFile, spec_of
from optigpu.cli.output import AsJson, FormatOption, OutputFormat, show_grid, show_job
from optigpu.vocabulary import DeviceKind, JobState

if TYPE_CHECKING:
    from optigpu.client import Client

Url = Annotated[str, typer.Option(envvar="OPTIGPU_URL", help="URL of the service.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPTIGPU_API_KEY", help="API key, if the service requires one.")
]
JobId = Annotated[str, typer.Argument(help="The job's id, as `optigpu submit` and `optigpu jobs` print it.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def add_commands(app: typer.Typer) -> None:
    add_flagged(app, submit, job_panels)
    commands: tuple[Callable[..., None], ...] = (watch, jobs, cancel, withdraw)
    for command in commands:
        app.command()(command)


def submit(
    given: Given,
    spec_file: SpecFile = None,
    watch_: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Submit a job to a service and print its id."""
    with connect(url, api_key) as client:
        job = client.submit(spec_of(given, lambda: _best_device(client), spec_file))
        typer.echo(job.id)
        if watch_:
            _follow(client, job.id, OutputFormat.TABLE)


def watch(
    job_id: JobId,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Follow a job to its end and show its results."""
    with connect(url, api_key) as client:
        _follow(client, job_id, format_)


def jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    json_: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List jobs, the newest first."""
    from optigpu.report import jobs_grid

    with connect(url, api_key) as client:
        page = client.jobs(state=state, limit=limit)
    if json_:
        typer.echo(page.model_dump_json(indent=2))
    else:
        show_grid(jobs_grid(page), OutputFormat.TABLE)


def cancel(job_id: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Cancel a job."""
    with connect(url, api_key) as client:
        job = client.cancel(job_id)
    asked = "" if job.state.is_final else ", and its worker was asked to stop it"
    typer.echo(f"The job is {job.state}{asked}.")


def withdraw(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of a result, or with --job of a job.")],
    reason: Annotated[str, typer.Option(help="Why; readers of the id are told it.")],
    job: Annotated[bool, typer.Option("--job", help="Withdraw a job with all of its results.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Withdraw a result, or a job with its results, from a service. Needs a key with the scope admin."""
    with connect(url, api_key) as client:
        withdrawn = client.withdraw_job(id_, reason) if job else client.withdraw_result(id_, reason)
    typer.echo(f"The {withdrawn.kind} was withdrawn by {withdrawn.withdrawn_by}: {withdrawn.reason}")


def connect(url: str, api_key: str | None) -> "Client":
    """A client of the service that does not log its retries."""
    from stamina.instrumentation import set_on_retry_hooks

    from optigpu.client import Client

    set_on_retry_hooks([])  # by default they write to the output
    return Client(url, api_key)


def _best_device(client: "Client") -> DeviceKind:
    """CUDA if a live worker has it, else the CPU."""
    has_cuda = any(worker.alive and worker.device is DeviceKind.CUDA for worker in client.workers())
    return DeviceKind.CUDA if has_cuda else DeviceKind.CPU


def _follow(client: "Client", job_id: str, form: OutputFormat) -> None:
    """Shows a job's progress on stderr until it has ended, then its results.

    Exit status 1 unless it succeeded.
    """
    from optigpu.documents.result import Attribution
    from optigpu.report import RunProgress, console

    try:
        with RunProgress(console(stderr=True)) as progress:
            job = client.wait(job_id, lambda event: progress.show(event.kind, event.data))
    except KeyboardInterrupt:
        typer.echo(
            f"The job continues. `optigpu watch {job_id}` follows it, `optigpu cancel {job_id}` stops it.",
            err=True,
        )
        raise
    if job.attribution:
        attribution = Attribution.model_validate(job.attribution, extra="ignore")
        show_job(client.report(job_id), attribution, form)
    if job.state is not JobState.SUCCEEDED:
        ended = "was cancelled" if job.state is JobState.CANCELLED else job.state
        typer.echo(f"The job {ended}: {job.reason or 'no reason was given'}", err=True)
        raise typer.Exit(1)
