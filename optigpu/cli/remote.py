"""Commands that talk to a service: submit, watch, jobs, cancel, leaderboard."""

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
    commands: tuple[Callable[..., None], ...] = (watch, jobs, cancel, leaderboard)
    for command in commands:
        app.command()(command)


def submit(
    given: Given,
    spec_file: SpecFile = None,
    plan: Annotated[str | None, typer.Option(help="single (the default), ladder or grid.")] = None,
    watch_: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Submit a job to a service and print its id."""
    with connect(url, api_key) as client:
        job = client.submit(spec_of(given, lambda: _best_device(client), spec_file, plan))
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


def leaderboard(
    metric: Annotated[str | None, typer.Option(help="The metric to rank by. Default: tokens_per_s.")] = None,
    workload: Annotated[str | None, typer.Option(help="A workload's kind or digest.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Only this class of hardware.")] = None,
    technique: Annotated[str | None, typer.Option(help="Only stacks with this technique.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(min=0, max=1, help="Minimum top-1 agreement with fp32, 0 to 1.")
    ] = None,
    max_kld: Annotated[
        float | None, typer.Option(min=0, help="Maximum mean divergence from fp32, in nats.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many rows, the best first.")] = 20,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show the best results of a service."""
    from optigpu.report import leaderboard_csv, leaderboard_grid

    query = {"metric": metric, "workload": workload, "model": model, "hardware": hardware}
    gates = {"min_top1": min_top1, "max_kld": max_kld}
    with connect(url, api_key) as client:
        page = client.leaderboard(**query, **gates, technique=technique, backend=backend, limit=limit)
    if format_ is OutputFormat.JSON:
        typer.echo(page.model_dump_json(indent=2))
    elif format_ is OutputFormat.CSV:
        typer.echo(leaderboard_csv(page), nl=False)
    else:
        show_grid(leaderboard_grid(page), format_)


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
