"""Several reports in one chart: their results, each labelled with what tells its report from the others."""

from collections.abc import Callable, Sequence

from optigpu.report.catalog import job_title
from optigpu.report.leaderboard import asked_text
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError


def _name(report: Document) -> str:
    return report["spec"].get("name") or ""


def _workload(report: Document) -> str:
    return asked_text(report["spec"])


def _hardware(report: Document) -> str:
    return " and ".join(sorted({result["environment"]["hardware_class"] for result in report["results"]}))


def _software(report: Document) -> str:
    environment = report["results"][0]["environment"]
    version = (environment.get("software") or {}).get("torch", "unknown")
    return f"torch {version}, commit {(environment.get('git_revision') or 'unknown')[:10]}"


def _time(report: Document) -> str:
    return str(report["results"][0]["created_at"])[:19].replace("T", " ")


DIFFERENCES: tuple[Callable[[Document], str], ...] = (_name, _workload, _hardware, _software, _time)
"""What may tell reports apart, what a reader looks for first."""


def combined(reports: Sequence[Document]) -> tuple[str, list[Document]]:
    """The title of a chart of one or more reports, and the results in it.

    Raises SpecError when there is nothing to draw, or when figures of different units would share an axis.
    """
    measured = [report for report in reports if report["results"]]
    if not measured:
        raise SpecError(
            "No report has a result to draw: run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`. "
            "`optigpu show` prints why a run has none."
        )
    if len(measured) == 1:
        return job_title(measured[0]["spec"], measured[0]["results"]), list(measured[0]["results"])
    metrics = sorted({result["variant"]["primary_metric"] for each in measured for result in each["results"]})
    if len(metrics) > 1:
        raise SpecError(
            f"One chart has one unit, and these reports have {', '.join(map(heading, metrics))}; draw them apart."
        )
    names = _names(measured)
    results = [
        _labelled(result, name)
        for report, name in zip(measured, names, strict=True)
        for result in report["results"]
    ]
    return " and ".join(dict.fromkeys(map(_workload, measured))), results


def _names(reports: Sequence[Document]) -> list[str]:
    """The first difference that all reports differ in; where there is none, their numbers too."""
    for difference in DIFFERENCES:
        names = [difference(report) for report in reports]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{number}: {_time(report)}" for number, report in enumerate(reports, 1)]


def _labelled(result: Document, name: str) -> Document:
    variant = result["variant"]
    return {**result, "variant": {**variant, "label": f"{variant['label']} ({name})"}}
