"""Quality figures with their intervals over windows (images, items): divergence, perplexity, accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.facts import QualityFacts
from optigpu.documents.result import MetricSummary
from optigpu.quality.divergence import Agreement
from optigpu.quality.hellaswag import Item, chosen_right
from optigpu.quality.passages import Passage, perplexity
from optigpu.quality.told import Bounded
from optigpu.statistics.estimates import (
    FEWEST_PARTS,
    Statistic,
    leave_one_out,
    part_bounds,
    parts_of,
    share_bounds,
)
from optigpu.vocabulary import OptiGPUError

Array = NDArray[np.float64]
Units = NDArray[np.int64]
"""The number from 0 of the window (image, item) that each observation belongs to."""

SHARES = ("top1_agreement", "accuracy")
NO_TAIL_INTERVAL = "A 99th percentile has no interval: a few positions decide it."


class Asked(NamedTuple):
    """What is answered, and how there can be more of it."""

    noun: str
    more: str


ITEMS = Asked("item", "Ask for more quality.items.")
PICTURES = Asked("image", "Put more images into the folder.")


@dataclass(frozen=True)
class Figures:
    """Some of the metrics. `without` are each metric's values without one part; `about` fills fields of TextQuality."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    without: dict[str, tuple[float, ...]] = field(default_factory=dict)
    no_interval: dict[str, str] = field(default_factory=dict)
    about: dict[str, float | None] = field(default_factory=dict)

    def __or__(self, other: "Figures") -> "Figures":
        return Figures(**{name: mine | vars(other)[name] for name, mine in vars(self).items()})


def windows_of(passages: Sequence[Passage]) -> Units:
    """The passage of each predicted token [positions]."""
    return np.repeat(np.arange(len(passages)), [passage.positions for passage in passages])


def divergence_figures(agreement: Agreement, units: Units) -> Figures:
    """kld_mean, kld_p99 and top1_agreement of positions whose windows are `units` [positions, or more]."""
    values = agreement.metrics()
    divergences, agreeing = agreement.divergences, agreement.agreeing
    figures = _measured(
        {
            "kld_mean": lambda kept: float(divergences[kept].mean()),
            "top1_agreement": lambda kept: float(agreeing[kept].mean()),
        },
        units[agreement.positions],
        len(agreement),
    )
    tail = Figures({"kld_p99": values["kld_p99"]}, no_interval={"kld_p99": NO_TAIL_INTERVAL})
    return figures | tail | Figures(about={"kld_standard_error": agreement.standard_error()})


def told_figures(bounded: Bounded, units: Units) -> Figures:
    """The same of what a server tells: the divergences are the bounds from above, and the interval of their mean
    reaches down to that of the bounds from below."""
    low, high = (divergence_figures(each, units) for each in (bounded.low, bounded.high))
    bounds = {name: (low.intervals.get(name, (0.0,))[0], reach[1]) for name, reach in high.intervals.items()}
    without = {name: values for name, values in high.without.items() if name in SHARES}
    return replace(high, intervals=bounds, without=without)


def perplexity_figures(found: Array, expected: Array, units: Units) -> Figures:
    """From log-likelihoods [positions] of a variant and of fp32. Raises OptiGPUError when one is not finite."""
    figures = _measured(
        {
            "perplexity": lambda kept: perplexity(found[kept]),
            "perplexity_delta": lambda kept: perplexity(found[kept]) - perplexity(expected[kept]),
        },
        units,
        len(found),
    )
    return figures | Figures(about={"fp32_perplexity": perplexity(expected)})


def accuracy_figures(items: Sequence[Item], found: Array, expected: Array) -> Figures:
    """accuracy and accuracy_loss_percent from the endings' log-likelihoods [4 * items] of a variant and of fp32."""
    figures = answer_figures(chosen_right(items, found), chosen_right(items, expected), ITEMS)
    return figures | Figures(about={"items": len(items)})


def answer_figures(ours: NDArray[np.bool_], theirs: NDArray[np.bool_], asked: Asked) -> Figures:
    """The same, from whether a variant and fp32 answer each item or image correctly; `asked` says what they are."""
    units = np.arange(len(ours))
    share = float(theirs.mean())
    error = float(ours.std(ddof=1) / np.sqrt(len(ours))) if len(ours) > 1 else None
    about = Figures(about={"accuracy_standard_error": error, "fp32_accuracy": share})
    figures = about | _measured({"accuracy": lambda kept: float(ours[kept].mean())}, units, len(ours))
    if share == 0:
        why = f"The fp32 model answers no {asked.noun} correctly, so the accuracy loss is undefined. {asked.more}"
        return figures | Figures(reasons={"accuracy_loss_percent": why})
    if (ours == theirs).all():
        why = f"An interval needs an {asked.noun} that fp32 answers otherwise; there is none. {asked.more}"
        return figures | Figures({"accuracy_loss_percent": 0.0}, no_interval={"accuracy_loss_percent": why})

    def loss(kept: NDArray[np.bool_]) -> float:
        right = theirs[kept].mean()
        return float(100 * (right - ours[kept].mean()) / right) if right else float("nan")

    return figures | _measured({"accuracy_loss_percent": loss}, units, len(ours))


def with_windows(
    metrics: Mapping[str, MetricSummary], quality: QualityFacts | None
) -> dict[str, MetricSummary]:
    """Summaries with the intervals over windows that quality figures have, or the reason why they have none."""
    if quality is None:
        return dict(metrics)
    found = {name: {"ci": bounds} for name, bounds in quality.intervals.items()}
    missing = {name: {"reason": reason} for name, reason in quality.no_interval.items()}
    return {
        name: summary.model_copy(update=found.get(name) or missing.get(name))
        for name, summary in metrics.items()
    }


def _measured(statistics: Mapping[str, Statistic], units: Units, count: int) -> Figures:
    parts, everything = parts_of(units), np.ones(count, dtype=np.bool_)
    values, intervals, without, no_interval = {}, {}, {}, {}
    for name, statistic in statistics.items():
        values[name] = statistic(everything)
        try:
            left = leave_one_out(statistic, parts)
        except OptiGPUError as error:
            no_interval[name] = str(error)
            continue
        value = values[name]
        bounds = share_bounds(value, count, left) if name in SHARES else part_bounds(value, left)
        if bounds is None:
            no_interval[name] = (
                f"An interval needs {FEWEST_PARTS} windows, images or items; there are {int(parts.max()) + 1}. Ask for "
                "more quality.tokens."
            )
        else:
            intervals[name], without[name] = bounds, left
    return Figures(values, {}, intervals, without, no_interval)
