"""The page at `/results/{id}`: everything that was measured of one variant, how sure it is, and how to get it.

It says how to measure the result's stack again: as Python, and as the JSON of a job.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pprint import pformat
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.charts import Figure, figure
from api.histograms import samples_data
from api.inputs import Id
from api.pages.figures import (
    Badge,
    FigureText,
    Measured,
    badge,
    badge_words,
    measured,
    primary_of,
    sentences,
    speedup_text,
)
from api.pages.view import Asked, ReaderView
from api.rendering import metric_heading
from optigpu.documents.versions import current, facts_of
from optigpu.documents.views import Baseline, History, HistoryPoint
from optigpu.job.measured import replay_request
from optigpu.job.spec import JobSpec
from optigpu.report.charts import CHARTS, Report
from optigpu.report.formats import short
from optigpu.statistics.compare import StoredResult
from optigpu.store import jobs, leaderboard, results
from optigpu.store.database import Session
from optigpu.vocabulary import METRICS, Document, NotFoundError, SpecError

router = APIRouter()
MOST_HISTOGRAMS = 3
WIDTH = 96
ARGUMENTS = ("backend", "device", "seed", "measure", "limits")


@router.get("/results/{id}")
def read_result(view: ReaderView, result_id: Id, _: Annotated[Asked, Query()]) -> Response:
    """As it was stored; an older or newer document is shown by the fields that it has."""
    with view.service.database.read() as session:
        document = current(results.get(session, result_id))
        stored = StoredResult.model_validate(document)
        files = results.list_artifacts(session, result_id).artifacts
        timeline = results.history_of(session, result_id)
        shapes = _histograms(session, stored)
        spec = _spec(session, document)
        baseline = leaderboard.baseline_of(session, result_id)
    return view.page(
        "result.html",
        result=document,
        stored=stored,
        measured_at=datetime.fromisoformat(str(document["created_at"])),
        metrics=tuple(_metrics(document)),
        primary=primary_of(document),
        badge=_badge(document),
        verdict=sentences(document["verdict"]),
        files=files,
        newer=_newer(timeline, result_id),
        earlier=len(timeline.points) - 1,
        histograms=shapes,
        again=again(document, spec),
        baseline=baseline,
        gain=_gain(baseline, document),
        roofline=roofline_facts(document),
        under_roofs=_roofline(document),
        quality=quality_facts(document),
        badge_words=badge_words(document, None if baseline is None else baseline.value),
        origin=view.origin,
        address=f"{view.origin}/results/{result_id}",
        environment=environment_facts(document),
        provenance=provenance_facts(document),
        how=measuring_facts(document),
    )


def _gain(baseline: Baseline | None, document: Document) -> FigureText | None:
    """How many times better it is than the baseline on the same hardware."""
    primary = document["metrics"].get(document["variant"]["primary_metric"])
    if baseline is None or baseline.result_id == document["id"] or not primary or primary["value"] is None:
        return None
    return speedup_text(baseline.value, primary)


def _badge(document: Document) -> Badge:
    verdict = document["verdict"]
    return badge(verdict["reasons"], verdict["warnings"])


def _metrics(document: Document) -> Iterator[Measured]:
    """The primary metric first, then in the order of the vocabulary."""
    first = document["variant"]["primary_metric"]
    order = {name: number for number, name in enumerate(METRICS)}
    names = sorted(document["metrics"], key=lambda name: (name != first, order.get(name, len(order)), name))
    return (measured(document, name) for name in names)


def _newer(timeline: History, result_id: str) -> HistoryPoint | None:
    """The result that has taken its place, if it is not the current one."""
    found = [point for point in timeline.points if point.standing == "current"]
    return next((point for point in found if point.result_id != result_id), None)


def _histograms(session: Session, stored: StoredResult) -> list[Figure]:
    """Of the metrics with raw samples, the primary one first: one histogram for each process."""
    first = stored.variant.primary_metric
    names = sorted(results.sample_names(session, stored.id), key=lambda name: name != first)
    found = []
    for number, name in enumerate(names[:MOST_HISTOGRAMS]):
        samples = results.unpack(*results.packed_samples(session, stored.id, name))
        with suppress(SpecError):  # none of them is finite
            data = samples_data(metric_heading(name), metric_heading(name), samples)
            found.append(figure(data, id_prefix=f"samples-{number}"))
    return found


def _roofline(document: Document) -> Figure | None:
    """The variant below the roofs of its machine; None where no roofline is known."""
    with suppress(SpecError, KeyError, ValueError):  # a document of another version may lack a part
        (panel,) = CHARTS["roofline"](Report("The roofline", [document])).panels
        return figure(panel, id_prefix="roofline") if panel.marks else None
    return None


def _spec(session: Session, document: Document) -> Document | None:
    """The request of the result's job, which may have been withdrawn."""
    if document.get("job_id") is None:
        return None
    try:
        return jobs.get(session, document["job_id"]).spec
    except NotFoundError:
        return None


@dataclass(frozen=True)
class Again:
    """The same request in both forms; or why there is none."""

    request: Document | None = None
    python: str = ""
    json: str = ""
    reason: str = ""


def again(result: Document, spec: Document | None) -> Again:
    """From a result as it was stored, and the request of its job."""
    try:
        written = _without_defaults(replay_request(result, spec, {}))
    except SpecError as error:
        return Again(reason=f"This version cannot measure it again: {error}")
    return Again(written, _python(written), json.dumps(written, indent=2, ensure_ascii=False))


def _without_defaults(request: Document) -> Document:
    """What differs from a job's usual fields, and those that name what is measured. Raises SpecError."""
    spec = JobSpec.model_validate(request)
    kept = spec.model_dump(mode="json", exclude_defaults=True)
    named = spec.model_dump(
        mode="json", include={"workload", "model", "backend", "device", "seed"}, exclude_none=True
    )
    return named | kept | {"workload": request["workload"], "stack": list(request["stack"])}


def _python(request: Document) -> str:
    model = f"    {request['model']!r},\n" if request.get("model") else ""
    stack = (
        _argument("stack", [_technique(each) for each in request["stack"]]) if request.get("stack") else ""
    )
    others = "".join(_argument(name, request[name]) for name in ARGUMENTS if name in request)
    workload = _indented(request["workload"])
    return f"import optigpu\n\nreport = optigpu.run(\n    {workload},\n{model}{stack}{others})\nprint(report)"


def _technique(technique: Document) -> object:
    """By its name alone where it has no parameters."""
    return technique["name"] if len(technique) == 1 else technique


def _argument(name: str, value: object) -> str:
    return f"    {name}={_indented(value, len(name) + 1)},\n"


def _indented(value: object, beside: int = 0) -> str:
    return pformat(value, width=WIDTH - beside, sort_dicts=False).replace("\n", "\n" + " " * (4 + beside))


Facts = tuple[tuple[str, str], ...]
LONGEST = 300
SHOWN_APART = ("accelerators", "software", "variables", "cpu_features")


def environment_facts(document: Document) -> Facts:
    """The machine: hardware first, then software."""
    environment = document["environment"]
    return (
        ("Hardware class", environment["hardware_class"]),
        *_plain(environment, left_out=("hardware_class", *SHOWN_APART)),
        *((f"GPU {number}", _line(gpu)) for number, gpu in enumerate(environment.get("accelerators", ()))),
        *(("CPU features", " ".join(each)) for each in [environment.get("cpu_features")] if each),
        *((name, str(version)) for name, version in sorted(environment.get("software", {}).items())),
        *((name, str(value)) for name, value in environment.get("variables", {}).items()),
    )


def provenance_facts(document: Document) -> Facts:
    """Where it comes from. What is not known is left out with its reason."""
    provenance = document.get("provenance") or {}
    reasons = (
        (f"No {name.replace('_', ' ')}", reason) for name, reason in provenance.get("reasons", {}).items()
    )
    ids = [
        ("Result", document["id"]),
        ("Job", document.get("job_id") or "none"),
        ("Source", document["source"]),
    ]
    variant = document["variant"]
    ids += [("Workload digest", variant["workload_digest"]), ("Variant digest", variant["variant_digest"])]
    return (*ids, *_plain(provenance, left_out=("reasons",)), *reasons)


def measuring_facts(document: Document) -> Facts:
    """How the variant ran: single facts; those that are made of others are shown elsewhere."""
    return tuple(
        _plain(facts_of(document), left_out=("reasons", "roofline", "quality", "recorded", "described"))
    )


def roofline_facts(document: Document) -> Facts:
    """How far the variant's step is from what the machine allows; the reason where that is not known."""
    roofline = facts_of(document).get("roofline") or {}
    step = roofline.get("step")
    if not step:
        return (("No roofline", roofline["reason"]),) if roofline.get("reason") else ()
    reached = step["attainable_s"] / step["measured_s"] if step.get("measured_s") else None
    roof = step["roof"]
    return (
        ("Share of the roof", "-" if reached is None else f"{100 * reached:.0f}%"),
        ("Limited by", str(step.get("bound") or "unknown")),
        ("Intensity", f"{short(step['flops_per_byte'])} FLOP per byte"),
        ("A step takes", f"{short(1e3 * step['measured_s'])} ms" if step.get("measured_s") else "-"),
        ("The roof allows", f"{short(1e3 * step['attainable_s'])} ms"),
        ("Measured bandwidth", f"{short(roof['bytes_per_s'] * 1e-9)} GB/s"),
        ("Measured rate", f"{short(roof['flops_per_s'] * 1e-9)} GFLOP/s"),
    )


def quality_facts(document: Document) -> Facts:
    """On what quality was measured."""
    quality = facts_of(document).get("quality") or {}
    return tuple(_plain(quality, left_out=("without_part", "losses", "fp32_losses", "intervals")))


def _plain(document: Document, left_out: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if name not in left_out and (words := _value(name, value)):
            yield name.replace("_", " ").capitalize(), words


def _value(name: str, value: object) -> str:
    """Empty for what is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return f"{short(value * 1e-9)} GB"
    if isinstance(value, float):
        return short(value)
    if isinstance(value, Mapping):
        return _line(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_line(each) if isinstance(each, Mapping) else str(each) for each in value)[:LONGEST]
    return str(value)[:LONGEST]


def _line(document: Document) -> str:
    """An object on one line, without what is not known."""
    known = ((name, value) for name, value in document.items() if value not in (None, {}, [], ()))
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known)[:LONGEST]
