"""Perplexity of a text, by overlapping windows.

Each token but the first is predicted exactly once, from as many tokens before it as its window holds (Hugging Face,
Perplexity of fixed-length models, huggingface.co/docs/transformers/perplexity).
"""

import math

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.passages import Ids, Passage
from optigpu.vocabulary import OptiGPUError

_MOST_NATS = 700.0
"""Above this the exponential overflows float64."""


def windows(tokens: Ids, window: int, stride: int) -> list[Passage]:
    """Windows of up to `window` tokens over a text's `tokens` [length], `stride` (less than `window`) apart.

    Raises OptiGPUError when the text is shorter than one window.
    """
    if len(tokens) < window:
        raise OptiGPUError(
            f"The text has {len(tokens)} tokens, fewer than one window of {window}; choose a longer text, or a smaller "
            "quality.window."
        )
    passages, predicted = [], 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        passages.append(Passage(tokens[begin:end], predicted - begin))
        predicted = end
        if end == len(tokens):
            break
    return passages


def perplexity(log_likelihoods: NDArray[np.float64]) -> float:
    """exp of the mean negative log-likelihood in nats. Raises OptiGPUError if it is not finite."""
    nats = -float(np.mean(log_likelihoods))
    if not nats <= _MOST_NATS:
        raise OptiGPUError(
            f"The mean negative log-likelihood is {nats:.3g} nats, too large for a perplexity."
        )
    return math.exp(nats)
