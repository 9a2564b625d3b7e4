"""Commands that talk to a service: submit, watch, jobs, cancel, withdraw; and leaderboard: boards of its comparable
results, or with --edge of its edge devices."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.options import Given, SpecFile, spec_of
from optigpu.cli.output import NOTHING_RANKED, FormatOption, OutputFormat, echo, present, show_job, show_list
from optigpu.variables import DEFAULT_URL as DEFAULT_URL  # what other commands take it from
from optigpu.vocabulary import DeviceKind, JobState, SpecError

if TYPE_CHECKING:
    from optigpu.client import Client
    from optigpu.documents.views import EventView


Url = Annotated[str, typer.Option(envvar="OPTIGPU_URL", help="URL of the service.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPTIGPU_API_KEY", help="API key, if the service requires one.")
]
JobId = Annotated[str, typer.Argument(help="The job's id, as `optigpu submit` and `optigpu jobs` print it.")]


def submit(
    given: Given,
    spec_file: SpecFile = None,
    watch_: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="With --via, print what the scheduler would run; submit nothing."),
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Submit a job to a service and print its id."""
    from optigpu.clusters import SCRIPTS, dry_task
    from optigpu.job.plan import variants_of
    from optigpu.job.search import foreseen

    with connect(url, api_key) as client:

        def usual_device() -> DeviceKind:
            if "via" in given:  # the devices of a scheduler are not known
                raise SpecError(
                    f"--via {given['via']}: name the device as well, --device cuda or --device cpu."
                )
            workers = client.workers()
            has_cuda = any(each.alive and each.device is DeviceKind.CUDA for each in workers)
            return DeviceKind.CUDA if has_cuda else DeviceKind.CPU

        spec = spec_of(given, usual_device, spec_file)
        if dry_run:
            if spec.via is None:
                raise SpecError("--dry-run prints what a scheduler would run; name one with --via slurm.")
            foreseen(spec, variants_of(spec))
            echo(SCRIPTS[spec.via](dry_task(spec)), nl=False)  # with the settings of this machine
            return
        job = client.submit(spec)
        echo(job.id)
        if watch_:
            _follow(client, job.id, OutputFormat.TABLE)
        elif job.unserved:
            echo(job.unserved.sentence, err=True)


def watch(
    job_id: JobId,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Follow a job to its end and show its results; the exit status says how it ended, as that of `run` does."""
    with connect(url, api_key) as client:
        _follow(client, job_id, format_)


def jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only jobs with this tag.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List jobs, the newest first."""
    from optigpu.report.catalog import jobs_grid

    with connect(url, api_key) as client:
        page = client.jobs(state=state, tag=tag, limit=limit)
    document = page.model_dump(mode="json")
    records = [{name: value for name, value in job.items() if name != "links"} for job in document["jobs"]]
    show_list(jobs_grid(page), records, document, format_)


def cancel(job_id: JobId, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Cancel a job."""
    with connect(url, api_key) as client:
        job = client.cancel(job_id)
    asked = "" if job.state.is_final else ", and its worker was asked to stop it"
    echo(f"The job is {job.state}{asked}.")


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
    echo(f"The {withdrawn.kind} was withdrawn by {withdrawn.withdrawn_by}: {withdrawn.reason}")


def connect(url: str, api_key: str | None) -> "Client":
    """A client of the service that does not log its retries."""
    from stamina.instrumentation import set_on_retry_hooks

    from optigpu.client import Client

    set_on_retry_hooks([])  # by default they write to the output
    return Client(url, api_key)


def _follow(client: "Client", job_id: str, form: OutputFormat) -> None:
    """Shows a job's progress on stderr until it has ended, then its results. Exit status 1 unless it succeeded, and 3
    if none of its results can be ranked."""
    from optigpu.documents.result import Attribution
    from optigpu.documents.versions import why_none_ranks
    from optigpu.report.formats import console
    from optigpu.report.progress import RunProgress

    def show(event: "EventView") -> None:
        """Also why no live worker can take a job that comes into the queue, if none can."""
        progress.show(event.kind, event.data)
        is_queued = event.kind == "state" and event.data["state"] == JobState.QUEUED
        if is_queued and (unserved := client.job(job_id).unserved):
            progress.show("unserved", unserved.model_dump())

    try:
        with RunProgress(console(stderr=True)) as progress:
            job = client.wait(job_id, show)
    except KeyboardInterrupt:
        echo(
            f"The job continues. `optigpu watch {job_id}` follows it, `optigpu cancel {job_id}` stops it.",
            err=True,
        )
        raise
    report = client.report(job_id)
    if job.attribution:
        show_job(report, Attribution.model_validate(job.attribution, extra="ignore"), form)
    if job.state is not JobState.SUCCEEDED:
        ended = "was cancelled" if job.state is JobState.CANCELLED else job.state
        echo(f"The job {ended}: {job.reason or 'no reason was given'}", err=True)
        raise typer.Exit(1)
    if job.reason:
        echo(job.reason, err=True)
    why = why_none_ranks(report["results"])
    if why and why not in (job.reason or ""):
        echo(why, err=True)
    if why:
        raise typer.Exit(NOTHING_RANKED)


OF_BOTH = ("metric", "model", "limit", "cursor")
"""The filters that both leaderboards have."""


def leaderboard(
    given: Given,
    edge: Annotated[
        bool,
        typer.Option(
            "--edge",
            help="Show edge devices, and the workers that ran the same network. --metric is latency, fps, energy, "
            "fps_per_watt or cost, --model the SHA-256 of a file, or the beginning of it.",
        ),
    ] = False,
    board: Annotated[str | None, typer.Option(help="With --edge: only this board of the catalog.")] = None,
    input_: Annotated[
        str | None,
        typer.Option("--input", help="With --edge: only inputs from fixed, camera, folder or v4l2."),
    ] = None,
    runner: Annotated[str | None, typer.Option(help="With --edge: only this runner.")] = None,
    include_unranked: Annotated[
        bool | None,
        typer.Option("--include-unranked", help="With --edge: add what does not rank, with its reasons."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="With --edge: the price of a device in US dollars. Default: the catalog's."),
    ] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option(help="With --edge: the price of a kilowatt-hour in US dollars.")
    ] = None,
    lifetime_years: Annotated[
        float | None,
        typer.Option(help="With --edge: the years over which the price of a device is spread. Default: 3."),
    ] = None,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show the best results of a service, on a board for each workload and model; with --edge its edge devices."""
    from optigpu.cli.flags import model_flags, read_flags
    from optigpu.documents.queries import LeaderboardQuery
    from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grids

    asked = read_flags(model_flags(LeaderboardQuery), given)
    of_devices = {
        "board": board,
        "input": input_,
        "runner": runner,
        "include_unranked": include_unranked,
        "price": price,
        "price_per_kwh": price_per_kwh,
        "lifetime_years": lifetime_years,
    }
    if edge:
        _refuse([name for name in asked if name not in OF_BOTH], "workers; leave --edge out")
    else:
        _refuse([name for name, value in of_devices.items() if value is not None], "devices; add --edge")
    with connect(url, api_key) as client:
        if edge:
            echo(_edge_text(client, format_, **asked, **of_devices), nl=False)
        else:
            page = client.leaderboard(**asked)
            document = page.model_dump(mode="json")
            present(format_, document, lambda: leaderboard_csv(page), lambda: leaderboard_grids(page))


def _edge_text(client: "Client", form: OutputFormat, **asked: str | float | bool | None) -> str:
    """As the service writes it: a table is Markdown. Raises SpecError for LaTeX, which it does not write."""
    if form is OutputFormat.JSON:
        return json.dumps(client.edge_leaderboard(**asked).model_dump(mode="json"), indent=2) + "\n"
    if form is OutputFormat.LATEX:
        raise SpecError(
            "--format tex: the service writes its devices as md, csv and json; choose one of these."
        )
    return client.edge_text("csv" if form is OutputFormat.CSV else "md", **asked)


def _refuse(names: Sequence[str], of_others: str) -> None:
    """Raises SpecError for options of the other leaderboard."""
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        are = "is an option" if len(names) == 1 else "are options"
        raise SpecError(f"{options} {are} of the leaderboard of {of_others}.")
