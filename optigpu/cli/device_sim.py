"""The command `device-sim`: a fleet of simulated devices against a service."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.interrupt import stoppable
from optigpu.cli.output import FormatOption, OutputFormat, show_list
from optigpu.cli.quantities import DURATION, read_quantity
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.client import Client
    from optigpu.edge.simulation.documents import DeviceAccount, FleetProgress, FleetResult
    from optigpu.report import Grid

INVITE = "python -m api devices invite --simulator --count"


def add_commands(app: typer.Typer) -> None:
    app.command(name="device-sim")(device_sim)


def device_sim(
    codes: Annotated[
        str,
        typer.Option(
            metavar="FILE", help=f"A file with an invite's code on each line, or - for stdin: `{INVITE} 200`."
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, max=5000, help="How many devices.")] = 200,
    for_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long they measure: 60s, 5m.")
    ] = "60s",
    rate: Annotated[
        str,
        typer.Option(metavar="N/TIME", help="Reports of each device: 1/s, 6/m, 1/h; at most one a second."),
    ] = "1/s",
    send_every: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How often a device's radio wakes up; a run that begins while it sleeps has no witness. 0: always.",
        ),
    ] = "10s",
    seed: Annotated[int, typer.Option(help="Of latencies, power and faults.")] = 0,
    faults: Annotated[
        str, typer.Option(help="none, all, or shares of requests such as reboot=0.05,lost_answer=0.1.")
    ] = "none",
    drain: Annotated[
        str, typer.Option(metavar="TIME", help="How long they may go on sending what is left.")
    ] = "30s",
    processes: Annotated[int, typer.Option(min=1, max=64, help="In how many processes they run.")] = 2,
    format_: FormatOption = OutputFormat.TABLE,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Run simulated devices against a service, and check that each report arrived there once.

    They run the real agent with a simulated board. Their rows say `simulator` and rank nowhere. Ctrl-C ends it with the
    account so far. Exit status 1 if a report was lost, doubled, altered or ranked, or a device could not enrol.
    """
    from optigpu.edge.simulation.fleet import FleetPlan, read_faults, run_fleet
    from optigpu.report import console

    plan = FleetPlan(
        url=url,
        seconds=float(read_quantity(for_, DURATION, "for")),
        drain_s=float(read_quantity(drain, DURATION, "drain")),
        period_s=period_of(rate),
        send_every_s=float(read_quantity(send_every, DURATION, "send_every")),
        seed=seed,
        faults=read_faults(faults),
        processes=min(processes, devices),
    )
    wanted = read_codes(codes, devices)
    with connect(url, api_key) as client, stoppable() as stop:
        plan = dataclasses.replace(plan, url=client.base_url)
        register_model(client)
        begun = time.monotonic()
        with console(stderr=True).status("starting") as status:
            accounts = run_fleet(plan, wanted, stop, lambda so_far: status.update(_said(so_far, devices)))
        found = audited(client, accounts, devices, time.monotonic() - begun)
    document = found.model_dump(mode="json")
    show_list(fleet_grid(found), [document], document, format_)
    if not found.is_right:
        raise typer.Exit(1)
    if stop():
        raise typer.Exit(stop.status)


def period_of(rate: str) -> int:
    """Seconds from run to run. Raises SpecError for what is no rate, or is more than one a second."""
    count, slash, unit = rate.partition("/")
    seconds = {"s": 1, "m": 60, "h": 3600}.get(unit.strip())
    if not (slash and seconds and count.strip().isdecimal() and 0 < int(count) <= seconds):
        raise SpecError(f"--rate {rate}: write 1/s, 6/m or 1/h, of one a second at the most.")
    return round(seconds / int(count))


def read_codes(name: str, count: int) -> list[str]:
    """That many codes of a file or of stdin. Raises SpecError if there are fewer."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--codes {name} cannot be read: {error}.") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if len(found) < count:
        raise SpecError(
            f"--codes {name} holds {len(found)} codes, and {count} devices need {count}: `{INVITE} {count}`."
        )
    return found[:count]


def register_model(client: "Client") -> None:
    """Tells the service of the simulated model, which is marked as not rankable."""
    from optigpu.edge.simulation.fleet import simulated_model
    from optigpu.edge.simulation.manifest import manifest_of

    client.add_edge_model(manifest_of(simulated_model()))


def audited(client: "Client", accounts: "list[DeviceAccount]", devices: int, seconds: float) -> "FleetResult":
    """Asks the service what it has, device by device, and compares."""
    from optigpu.edge.simulation.audit import audit, stored_report

    stored = {
        account.device_id: [
            stored_report(each.document, each.source, each.ranked)
            for each in client.device_reports(account.device_id)
        ]
        for account in accounts
        if account.device_id
    }
    return audit(accounts, stored, devices, seconds)


def fleet_grid(found: "FleetResult") -> "Grid":
    """A row for each figure, those that must be 0 marked."""
    from optigpu.report import Column, Grid

    rows = [
        ("devices enrolled", f"{found.enrolled} of {found.devices}", "all"),
        ("reports made", str(found.made), ""),
        ("acknowledged", str(found.acknowledged), ""),
        ("stored by the service", str(found.stored), ""),
        ("still waiting on a device", str(found.waiting), ""),
        ("cut off by a power cut", str(found.cut), ""),
        ("dropped by a full medium", str(found.dropped), ""),
        ("lost", str(found.lost), "0"),
        ("acknowledged and not stored", str(found.unstored), "0"),
        ("duplicated", str(found.duplicated), "0"),
        ("altered", str(found.altered), "0"),
        ("of nobody", str(found.foreign), "0"),
        ("refused as a conflict", str(found.conflicts), "0"),
        ("ranked", str(found.ranked), "0"),
        ("requests answered", str(found.requests.count), ""),
        ("request time p50 (ms)", _ms(found.requests.p50_ms), ""),
        ("request time p99 (ms)", _ms(found.requests.p99_ms), ""),
    ]
    notes = [f"Boots: {found.boots}. Answers: {_listed(found.statuses)}."]
    notes += [f"Faults: {_listed(found.faults)}."] if found.faults else []
    notes += [f"Quarantined: {_listed(found.quarantined)}."] if found.quarantined else []
    return Grid(
        title=f"{found.devices} simulated devices for {found.seconds:.0f} s",
        columns=(Column("what"), Column("count", right=True), Column("must be")),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _said(so_far: "FleetProgress", devices: int) -> str:
    return f"{so_far.enrolled} of {devices} enrolled, {so_far.made} reports made, {so_far.acknowledged} acknowledged"
