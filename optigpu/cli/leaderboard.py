"""The command `leaderboard`: boards of a service's comparable results, or with --edge of its edge devices."""

from collections.abc import Mapping
from typing import Annotated

import typer

from optigpu.cli.output import FormatOption, OutputFormat, present
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.vocabulary import SpecError

Asked = Mapping[str, str | float | bool | None]
"""The filters, by their names; None where one was not given."""


def leaderboard(
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric to rank by. Default: the primary one of each workload; with --edge latency, or "
            "fps, energy, fps_per_watt or cost."
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="A workload's kind, or the digest of one board.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Only this model; with --edge the SHA-256 of its file, or the beginning of it."),
    ] = None,
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
    edge: Annotated[
        bool, typer.Option("--edge", help="Show edge devices, and the workers that ran the same network.")
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
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="How many rows of each board. Default: 50; 5 for several boards."),
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="The next page, as --format json names it.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Show the best results of a service, on a board for each workload and model; with --edge its edge devices."""
    from optigpu.report import edge_csv, edge_grids, leaderboard_csv, leaderboard_grids

    both: Asked = {"metric": metric, "model": model, "limit": limit, "cursor": cursor}
    of_workers: Asked = {
        "workload": workload,
        "hardware": hardware,
        "technique": technique,
        "backend": backend,
        "min_top1": min_top1,
        "max_kld": max_kld,
        "clean": clean,
        "source": source,
        "include_invalid": include_invalid,
        "include_history": include_history,
    }
    of_devices: Asked = {
        "board": board,
        "input": input_,
        "runner": runner,
        "include_unranked": include_unranked,
        "price": price,
        "price_per_kwh": price_per_kwh,
        "lifetime_years": lifetime_years,
    }
    asked, others = (of_devices, of_workers) if edge else (of_workers, of_devices)
    _refuse(others, edge=edge)
    with connect(url, api_key) as client:
        if edge:
            devices = client.edge_leaderboard(**both, **asked)
            document = devices.model_dump(mode="json")
            present(format_, document, lambda: edge_csv(devices), lambda: edge_grids(devices))
        else:
            page = client.leaderboard(**both, **asked)
            document = page.model_dump(mode="json")
            present(format_, document, lambda: leaderboard_csv(page), lambda: leaderboard_grids(page))


def _refuse(others: Asked, *, edge: bool) -> None:
    """Raises SpecError for options of the other leaderboard."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if given:
        options = f"{', '.join(given)} {'is an option' if len(given) == 1 else 'are options'}"
        raise SpecError(
            f"{options} of the leaderboard of {'workers; leave --edge out' if edge else 'devices; add --edge'}."
        )
