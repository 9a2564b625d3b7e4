"""The command `claims`: published figures beside measured ones. It reads a service's leaderboard if given its URL."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.output import FormatOption, OutputFormat, present
from optigpu.cli.remote import ApiKey, connect
from optigpu.vocabulary import METRICS, Document, ServiceError, SpecError

if TYPE_CHECKING:
    from optigpu.claims import Book, Measured
    from optigpu.client import Client
    from optigpu.documents.edge import EdgeBoard

NOT_THERE = 404
MOST_JOBS = 20
"""The most jobs of the leaderboard's first rows whose reports are read for the speedup of their stacks."""

MaybeUrl = Annotated[
    str | None,
    typer.Option(envvar="OPTIGPU_URL", help="URL of a service whose leaderboard is read too. Default: none."),
]


def claims(
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.JSON",
            help="A file that `optigpu run --format json` wrote; may be given several times.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Hardware whose peaks the measured gain is compared with. Default: the two devices of the thesis."
        ),
    ] = None,
    format_: FormatOption = OutputFormat.TABLE,
    url: MaybeUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Show published figures: whether they are plausible, and what was measured on the same hardware."""
    from optigpu.claims import baselines, compare_founding, from_results, weigh
    from optigpu.report.claims import claim_rows, claims_csv, claims_document, claims_grid

    book = baselines()
    reports = [read_report(path) for path in results or ()]
    measured = [figure for report in reports for figure in from_results(report["results"])]
    boards: list[EdgeBoard] = []
    if url is not None:
        ranked, jobs, boards = _asked(book, url, api_key)
        measured += ranked
        reports += jobs
    rows, thesis = claim_rows(book, measured), weigh(book.thesis, reports, against)
    founding = compare_founding(book, boards)
    present(
        format_,
        claims_document(rows, thesis, founding),
        lambda: claims_csv(rows),
        lambda: [claims_grid(rows, thesis, founding)],
    )


def read_report(path: Path) -> Document:
    """The report of a job from a file. Raises SpecError if the file cannot be read or is not the output of `optigpu run
    --format json`."""
    from optigpu.claims import from_results, gap_of

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        from_results(report["results"])
        gap_of(report)
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SpecError(
            f"{path} is not the report of a job; write one with `optigpu run --format json > {path.name}`."
        ) from None
    found: Document = report
    return found


def _asked(
    book: "Book", url: str, api_key: str | None
) -> tuple[list["Measured"], list[Document], list["EdgeBoard"]]:
    """The leaderboard's figures for the metrics of the claims, the reports of the jobs of the first rows, and the
    boards of edge devices."""
    from optigpu.claims import from_leaderboard, from_results, says_too_little

    with connect(url, api_key) as client:
        metrics = dict.fromkeys(claim.metric for claim in book.claims if claim.metric in METRICS)
        rows = [row for metric in metrics for row in client.leaderboard_rows(metric=metric)]
        whole = dict.fromkeys(row.result_id for row in rows if says_too_little(row))
        figures = from_leaderboard(rows) + from_results(client.result(result) for result in whole)
        jobs = list(dict.fromkeys(row.job_id for row in rows if row.job_id))[:MOST_JOBS]
        return figures, [client.report(job) for job in jobs], _edge_boards(client)


def _edge_boards(client: "Client") -> list["EdgeBoard"]:
    """Those by images per joule; none of an older service, which has no such leaderboard."""
    try:
        return list(client.edge_boards(metric="fps_per_watt"))
    except ServiceError as error:
        if error.status == NOT_THERE:
            return []
        raise
