"""Whether tokens are those that the engine's own logits choose."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import Logits

TOLERANCE = 0.1
"""A token may be less likely than the best one by this share of the standard deviation of the logits: a batch rounds
other than a single sequence does."""
AGREEMENT = 0.95
"""Of the tokens, so many must be the most likely ones within that."""
CHECKED_S, FEWEST_CHECKED = 2.0, 8
"""A check predicts all tokens of a request again, or as many as take so long, from a place that nobody knows before."""


def near_best(logits: Logits, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each row's token [batch] is the most likely one by its logits [batch, vocabulary], within TOLERANCE."""
    rows = np.arange(len(tokens))
    behind = logits.max(axis=-1) - logits[rows, tokens]
    near: NDArray[np.bool_] = behind <= TOLERANCE * logits.std(axis=-1)
    return near


def is_agreement(agreed: int, compared: int) -> bool:
    """Whether enough of the tokens agree."""
    return agreed >= AGREEMENT * compared


def checked_places(first: int, last: int, request_s: float, seed: int) -> tuple[int, int]:
    """The range of places [begin, end) of which a check predicts the tokens again: all from `first` to `last`, or some
    where a request takes long."""
    count = last - first
    affordable = max(FEWEST_CHECKED, math.floor(count * CHECKED_S / max(request_s, 1e-9)))
    if affordable >= count:
        return first, last
    begin = first + int(np.random.default_rng(seed).integers(count - affordable + 1))
    return begin, begin + affordable


def count_near(predicted: Iterator[Logits], tokens: NDArray[np.int64]) -> tuple[int, int]:
    """How many of `tokens` [batch, places] agree with the logits that are predicted for each place, and how many are
    NaN or infinite of all logits."""
    agreed, wrong = 0, 0
    for place, logits in zip(tokens.T, predicted, strict=False):
        wrong += int((~np.isfinite(logits)).sum())
        agreed += int(near_best(logits, place).sum()) if not wrong else 0
    return agreed, wrong
