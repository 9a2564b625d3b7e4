"""The commands `compare` and `replay`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from optigpu.cli.measuring import Stop, stoppable
from optigpu.cli.options import Given
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_list
from optigpu.cli.remote import DEFAULT_URL, ApiKey, Url, connect
from optigpu.documents.files import read_json
from optigpu.vocabulary import Document, SpecError, is_id

if TYPE_CHECKING:
    from optigpu.documents.views import Comparison
    from optigpu.job.spec import JobSpec
    from optigpu.measure import Report

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
    from optigpu.report import comparison_grid
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
    from optigpu.job.replay import replay_note
    from optigpu.report import comparison_grid
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
    from optigpu.job.replay import replay_request

    request = replay_request(stored.result, stored.spec, changes["measure"])
    try:
        return validated(request | {"limits": {**request["limits"], **changes["limits"]}})
    except SpecError as error:
        raise SpecError(f"This version cannot measure the result again:\n{error}") from error


def _run(spec: "JobSpec", stop: Stop) -> "Report":
    """Runs the job with progress on stderr. Exit status 1 if there is no result, and that of `stop` if it asked."""
    from optigpu.documents.events import as_document
    from optigpu.measure import run
    from optigpu.report import RunProgress, console

    with RunProgress(console(stderr=True)) as progress:
        report = run(spec, lambda event: progress.show(event.kind, as_document(event)), cancelled=stop)
    for outcome in report.outcomes:
        if outcome.result is None:
            echo(f"The result was not measured again: {outcome.status}: {outcome.reason}", err=True)
            raise typer.Exit(stop.status if report.cancelled else 1)
    if report.stopped:
        echo(report.stopped, err=True)
    return report
