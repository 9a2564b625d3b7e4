"""The command `leaderboard`: boards of a service's comparable results."""

from typing import Annotated

import typer

from optigpu.cli.output import FormatOption, OutputFormat, show_grid
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect


def add_commands(app: typer.Typer) -> None:
    app.command()(leaderboard)


def leaderboard(
    metric: Annotated[
        str | None, typer.Option(help="The metric to rank by. Default: the primary one of each workload.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="A workload's kind, or the digest of one board.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Only this class of hardware, or a part of its name.")
    ] = None,
    technique: Annotated[str | None, typer.Option(help="Only stacks with this technique.")] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(min=0, max=1, help="Minimum top-1 agreement with fp32, 0 to 1.")
    ] = None,
    max_kld: Annotated[
        float | None, typer.Option(min=0, help="Maximum mean divergence from fp32, in nats.")
    ] = None,
    clean: Annotated[bool | None, typer.Option("--clean", help="Leave out rows with warnings.")] = None,
    include_invalid: Annotated[
        bool | None, typer.Option("--include-invalid", help="Add invalid results, with their reasons.")
    ] = None,
    include_history: Annotated[
        bool | None,
        typer.Option("--include-history", help="Add earlier results of the same variant and hardware."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Where results come from. Default: worker.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="How many rows of each board. Default: 50; 5 for several boards."),
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="The next page, as --format json names it.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show the best results of a service, on a board for each workload and model."""
    from optigpu.report import leaderboard_csv, leaderboard_grids

    query = {"metric": metric, "workload": workload, "model": model, "hardware": hardware}
    gates = {"min_top1": min_top1, "max_kld": max_kld, "clean": clean}
    added = {"include_invalid": include_invalid, "include_history": include_history}
    with connect(url, api_key) as client:
        page = client.leaderboard(
            **query,
            **gates,
            **added,
            technique=technique,
            backend=backend,
            source=source,
            limit=limit,
            cursor=cursor,
        )
    if format_ is OutputFormat.JSON:
        typer.echo(page.model_dump_json(indent=2))
    elif format_ is OutputFormat.CSV:
        typer.echo(leaderboard_csv(page), nl=False)
    else:
        for grid in leaderboard_grids(page):
            show_grid(grid, format_)
