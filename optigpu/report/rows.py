"""The rows of a job's table, for all of its forms: each variant with its result; and when, where and with which
software results were measured. Results are plain JSON, so that a run in this process and a job that was read back from
a service are shown by the same lines."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from optigpu.documents.result import Attribution, AttributionRow
from optigpu.vocabulary import METRICS, Document

HEADINGS = {
    "tokens_per_s": "tokens/s", "prefill_tokens_per_s": "prompt tokens/s",
    "scored_tokens_per_s": "scored tokens/s", "requests_per_s": "requests/s", "images_per_s": "images/s",
    "samples_per_s": "samples/s", "tflops": "TFLOP/s", "gb_per_s": "GB/s", "largest_batch": "largest batch",
}  # fmt: skip


def heading(metric: str) -> str:
    """A metric's name and unit for a heading."""
    return HEADINGS.get(metric) or f"{metric} ({METRICS[metric].unit})"


def took_turns(result: Document) -> bool:
    """Whether its ratios to others come from turns that followed each other."""
    return any(summary.get("beside") for summary in result["metrics"].values())


@dataclass(frozen=True)
class Row:
    """One variant: how it ended, its gains, and its result as plain JSON, if it has one."""

    ended: AttributionRow
    result: Document | None

    @property
    def label(self) -> str:
        return self.ended.label

    @property
    def valid(self) -> bool:
        return self.result is not None and bool(self.result["verdict"]["valid"])

    @property
    def warnings(self) -> list[str]:
        """The warnings of a valid result."""
        return list(self.result["verdict"]["warnings"]) if self.result else []

    @property
    def workload(self) -> str:
        """The kind of workload; empty without a result."""
        return str(self.result["variant"]["workload"].get("kind", "")) if self.result else ""

    def metric(self, name: str) -> Document | None:
        """The summary of a metric; None if the variant has none."""
        return self.result["metrics"].get(name) if self.result else None

    def has_figure(self, name: str) -> bool:
        summary = self.metric(name)
        return summary is not None and summary["value"] is not None


def empty_cells(heading: str, lacking: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Why a column has no figure for some variants, given their labels and reasons: each reason once."""
    labels: dict[str, list[str]] = {}
    for label, reason in lacking:
        labels.setdefault(reason or "it was not measured", []).append(label)
    for reason, those in labels.items():
        yield f"no {heading} ({', '.join(those)}): {reason}"


def rows_of(attribution: Attribution, results: Sequence[Document]) -> tuple[Row, ...]:
    """The variants in the order of the plan, each with its result."""
    by_index = {result["variant"]["index"]: result for result in results}
    return tuple(Row(ended, by_index.get(ended.index)) for ended in attribution.rows)


_SHORT_COMMIT = 10


def origin_line(results: Sequence[Document]) -> str | None:
    """One sentence; None without results. Several machines or versions are all named."""
    if not results:
        return None
    environments = [result["environment"] for result in results]
    days = sorted({str(result["created_at"])[:10] for result in results})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    where = " and ".join(dict.fromkeys(environment["hardware_class"] for environment in environments))
    software = " and ".join(dict.fromkeys(map(_software, environments)))
    return f"Measured {when} on {where}; {software}."


def _software(environment: Document) -> str:
    versions = environment.get("software") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "optigpu") if name in versions]
    if environment.get("driver"):
        named.append(f"driver {environment['driver']}")
    if commit := environment.get("git_revision"):
        changed = " with changes" if environment.get("git_dirty") else ""
        named.append(f"commit {commit[:_SHORT_COMMIT]}{changed}")
    return ", ".join(named) or "software unknown"
