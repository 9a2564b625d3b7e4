"""Accuracy mode: one inference for each sample, then top-1, or the area under the ROC curve for anomalies."""

from collections.abc import Callable, Sequence

import numpy as np

from optigpu.edge.tiny.datasets import Sample
from optigpu.edge.tiny.device import Device
from optigpu.edge.tiny.errors import AnswerError, ResetError, SilenceError
from optigpu.edge.tiny.profiles import Profile, Quality
from optigpu.vocabulary import SpecError

TRIES = 2


def answers(
    device: Device, samples: Sequence[Sample], on_sample: Callable[[int], None] = lambda _: None
) -> list[tuple[float, ...]]:
    """The device's result for each sample; of several segments their mean. Raises TinyError."""
    found = []
    for number, sample in enumerate(samples, 1):
        segments = np.array([_answer(device, data) for data in sample.segments])
        found.append(tuple(map(float, segments.mean(axis=0))))
        on_sample(number)
    return found


def _answer(device: Device, data: bytes) -> tuple[float, ...]:
    """One result. What is lost with a garbled line or a restart of the board is asked for once more."""
    for again in reversed(range(TRIES)):
        try:
            device.load(data)
            return device.infer(1, 0).results
        except (AnswerError, ResetError, SilenceError):
            if not again:
                raise
            device.identify()
    raise AssertionError("the last try returns or raises")


def quality_of(profile: Profile, labels: Sequence[int], results: Sequence[tuple[float, ...]]) -> float:
    """Top-1 or the area under the ROC curve, 0 to 1. Raises SpecError for labels that do not fit the results."""
    if profile.quality is Quality.AUC:
        if {len(result) for result in results} != {1}:
            raise SpecError(
                f"{profile.name} answers one number for an input; this device gives {len(results[0])}."
            )
        return area(labels, [result[0] for result in results])
    widths = {len(result) for result in results}
    if len(widths) != 1:
        raise AnswerError("The device's results have different numbers of classes.")
    (classes,) = widths
    if not 0 <= min(labels) <= max(labels) < classes:
        raise SpecError(f"The labels are {min(labels)} to {max(labels)}; the device knows {classes} classes.")
    chosen = np.argmax(np.array(results), axis=1)
    return float(np.mean(chosen == np.array(labels)))


def area(labels: Sequence[int], scores: Sequence[float]) -> float:
    """The area under the ROC curve: how often an anomaly (label 1) has the higher score; a tie counts one half.

    Raises SpecError unless there are both.
    """
    if set(labels) != {0, 1}:
        raise SpecError(
            "The area under the ROC curve needs labels 0 (normal) and 1 (anomaly), and both of them."
        )
    values = np.array(scores)
    positive = np.array(labels) == 1
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # the mean rank of equal values, from 1
    above = int(positive.sum())
    below = len(values) - above
    return float((ranks[positive].sum() - above * (above + 1) / 2) / (above * below))
