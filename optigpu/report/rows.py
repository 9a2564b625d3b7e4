"""The rows of a job's table, for all of its forms: each variant with its result; the notes below it: the meaning of its
columns, and why a cell is empty; and when, where and with which software results were measured. Results are plain JSON,
so that a run in this process and a job that was read back from a service are shown by the same lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from optigpu.documents.result import (
    OF_THE_OUTPUT,
    Attribution,
    AttributionRow,
    Gain,
    VerdictReason,
    VerdictWarning,
)
from optigpu.report.formats import ratio
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


REASONS: dict[str, str] = {
    VerdictReason.OUTPUT_INVALID: "the output failed its check",
    VerdictReason.QUALITY_BELOW_GATE: "the quality loss exceeds the limits of the job",
    VerdictReason.LOSS_DIVERGED: "the losses of training left the band of fp32's",
    VerdictReason.CACHED_RESULT: "outputs came from a cache instead of being computed",
    VerdictReason.CLOCK_CONTRADICTED: "the times that the process told contradict the time that passed",
    VerdictReason.HARNESS_REPLACED: "a technique replaced a part of what measures it",
    VerdictReason.WARM_UP_SLEPT: "the warm-up waited, and timed requests did not",
    VerdictReason.WORKED_WHILE_IDLE: "the process computed while it was asked nothing",
    VerdictReason.UNDECLARED_ROUNDING: "it computed in fewer bits than its stack says",
    VerdictReason.NOT_THE_MODEL: "its predictions are not those of the model, and its stack rounds nothing",
    VerdictReason.WRONG_DEVICE: "another device computed than the one that was asked for",
    VerdictReason.THROTTLED: "the hardware was throttled during the measurement",
    VerdictReason.LITTLES_LAW: "the load's own counts contradict each other",
    VerdictReason.FOREIGN_PROCESS: "other processes used the device during the measurement",
    VerdictReason.DRIFT: "the speed changed during the measurement",
    VerdictReason.INTERRUPTED: "the measurement was suspended for a while",
}
"""What each reason of a verdict means."""

WARNINGS: dict[str, str] = {
    VerdictWarning.SINGLE_REPLICATE: "only one process was measured; the intervals do not show how processes differ",
    VerdictWarning.INCOMPLETE: "fewer processes were measured than the job asked for",
    VerdictWarning.NOT_CONVERGED: "the interval was too wide at the time limit, or the warm-up did not settle",
    VerdictWarning.FEW_SAMPLES: "too few requests for a reliable interval",
    VerdictWarning.DISTURBED: "something disturbed the measurement, and the intervals include what it can have cost",
    VerdictWarning.CLOCK_UNSTABLE: "the clock of the device changed during the measurement",
    VerdictWarning.SHARED_HOST: "the host was shared with other virtual machines or jobs",
    VerdictWarning.HANDICAPPED_BUILD: "the engine's library lacks instructions that this machine has",
    VerdictWarning.PARTLY_QUANTIZED: "less than 90% of the weights are quantized; the others are as they were loaded",
    VerdictWarning.UNUSED_TENSORS: "the checkpoint has tensors that the model does not compute with",
    VerdictWarning.SATURATED: "requests came faster than they were served; latencies depend on the length of a run",
    VerdictWarning.SATURATION_UNDECIDED: "the queue grew, but every round was disturbed, which lets a queue grow too",
}
"""What each warning of a verdict means."""


def ladder_notes(rows: Sequence[Row], attribution: Attribution, shown: Sequence[str]) -> Iterator[str]:
    """The notes of a table that shows the metrics `shown`."""
    if any(row.has_figure(attribution.metric) for row in rows):
        yield "± and [ ] are 95% intervals."
    if len(rows) > 1:
        yield from _best(rows, attribution)
    yield from _gain_words(rows)
    if "headroom" in shown:
        yield "headroom: how many times faster the measured peaks of this machine allow, and what limits the variant."
    if "top1_agreement" in shown:
        yield "top-1: the share of positions at which the most likely token is the same as the fp32 model's."
    if "alone_agreement" in shown:
        yield "as alone: the share of the tokens decoded under load that are those of decoding each request alone."
    if attribution.baseline_again:
        yield (
            f"At the end the baseline ran at {ratio(attribution.baseline_again)} of its first speed. The memory was "
            "too small to keep all variants loaded, so the ratios include changes of the machine's speed."
        )
    yield from _marks(rows, attribution)
    for row in rows:
        if row.result is None:
            yield f"{row.label}: {row.ended.status}: {row.ended.reason}"
        elif not row.valid:
            notes = [f"{why_invalid(row.result)}.", *row.result["verdict"]["notes"]]
            yield f"{row.label}: invalid, not ranked: {' '.join(notes)}"
    for name in shown:
        nulls = [(row.label, found) for row in rows if (found := row.metric(name)) and found["value"] is None]
        yield from empty_cells(name, ((label, found.get("reason")) for label, found in nulls))
    yield from _warnings(rows)


def _best(rows: Sequence[Row], attribution: Attribution) -> Iterator[str]:
    if not any(row.valid for row in rows):
        yield "No variant has a valid result." if attribution.best is None else "Only the ratios are valid."
    for row in rows:
        if row.ended.index == attribution.best:
            gain = f", {ratio(row.ended.speedup)} the baseline" if row.ended.speedup else ""
            yield f"* the fastest: {row.label}{gain}."


def _gain_words(rows: Sequence[Row]) -> Iterator[str]:
    """The explanation of each shown ratio."""
    names = {row.ended.index: row.label for row in rows}
    if any(row.ended.speedup for row in rows):
        yield "speedup: relative to the baseline; above 1 is better."
    references = {names[row.ended.alone.compared_with] for row in rows if row.ended.alone}
    if references:
        others = ", ".join(sorted(references - {"baseline"}))
        instead = f"; relative to {others} where the baseline already includes it" if others else ""
        yield f"alone: the speedup of the technique by itself{instead}."
    if any(row.ended.added for row in rows):
        yield "added: the speedup over the previous rung of the ladder."
    if any(row.ended.over_compiled for row in rows):
        yield "over compiled: the speedup over torch.compile of the reference."
    if any(row.ended.left_out for row in rows):
        yield "left out: the speedup of the whole stack over the whole without the technique; no order changes it."
    for row in rows:
        if row.ended.left_out and row.ended.left_out_with:
            others = ", ".join(row.ended.left_out_with)
            requires = "requires" if len(row.ended.left_out_with) == 1 else "require"
            yield f"{row.ended.technique} is left out together with {others}, which {requires} it."
    if any(_gains(row) for row in rows) and any(row.result and took_turns(row.result) for row in rows):
        yield "Ratios are of turns that followed each other, and can differ from the quotients of the figures."
    yield from _payback_words(rows, names)


def _payback_words(rows: Sequence[Row], names: Mapping[int, str]) -> Iterator[str]:
    """What the column means, and why compiling is never paid back."""
    found = [row.ended.payback for row in rows if row.ended.payback]
    if found:
        others = sorted({names[each.compared_with] for each in found})
        yield f"paid back: steps after which compiling has saved the time that it took, against {', '.join(others)}."
    for row in rows:
        if row.ended.payback and row.ended.payback.reason:
            yield f"{row.label}: {row.ended.payback.reason}"


def _marks(rows: Sequence[Row], attribution: Attribution) -> Iterator[str]:
    """What the mark means, and why ratios carry it or do not."""
    invalid = [row for row in rows if row.has_figure(attribution.metric) and not row.valid]
    if not invalid:
        return
    yield "!: not valid, and not ranked; why is said below."
    if any(gain.valid for row in invalid for gain in _gains(row)):
        yield (
            "A ratio without ! is valid although a figure is not: its variants took turns, so that what disturbed one "
            "disturbed the other."
        )
    names = {row.ended.index: row.label for row in rows}
    for row in rows:
        ratios = {
            ("the whole stack" if gain is row.ended.left_out else row.label, gain.compared_with): gain
            for gain in _gains(row)
            if not gain.valid
        }
        for (whose, reference), gain in ratios.items():
            why = "; ".join(words_of(REASONS, reason) for reason in gain.reasons)
            apart = "" if OF_THE_OUTPUT.issuperset(gain.reasons) else "; the two did not take turns"
            yield f"{whose} relative to {names[reference]}: not valid: {why}{apart}."


def _gains(row: Row) -> list[Gain]:
    ended = row.ended
    return [
        gain
        for gain in (ended.speedup, ended.alone, ended.added, ended.left_out, ended.over_compiled)
        if gain
    ]


def why_invalid(result: Document) -> str:
    """The reasons of its verdict in words."""
    return "; ".join(words_of(REASONS, reason) for reason in result["verdict"]["reasons"])


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Each warning once, with the variants that carry it."""
    valid = sum(row.valid for row in rows)
    for warning, labels in carriers_of(rows).items():
        who = "all" if len(labels) == valid else ", ".join(labels)
        yield f"{warning} ({who}): {words_of(WARNINGS, warning)}."


def carriers_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The labels of the valid results that carry each warning."""
    carriers: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.warnings if row.valid else ():
            carriers.setdefault(warning, []).append(row.label)
    return carriers


def words_of(table: Mapping[str, str], name: str) -> str:
    """The meaning of a name; the name itself if this version does not know it."""
    return table.get(name, name)
