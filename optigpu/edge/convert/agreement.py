"""How far the INT8 model agrees with the FP32 model on held-out inputs."""

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.manifest import Agreement, TensorFormat

Floats = NDArray[np.float64]
ONE = 1e-3
"""How far the sum of a distribution may be from 1."""


def agreement(floats: NDArray[np.float32], integers: NDArray[np.int8], output: TensorFormat) -> Agreement:
    """Both hold one row of class scores for each input: probabilities, else logits.

    A probability that INT8 cannot tell from 0 counts as half a step, so that the divergence stays finite.
    """
    count = len(integers)
    if floats.ndim != 2 or floats.shape[1] < 2:
        return Agreement(samples=count, reason="The output is no distribution over classes.")
    expected = floats[:count].astype(np.float64)
    if not np.isfinite(expected).all():
        return Agreement(samples=count, reason="The FP32 network answers with NaN or infinity.")
    if not np.ptp(expected, axis=0).any() and count > 1:
        return Agreement(samples=count, reason="The FP32 network answers the same to each held-out input.")
    found = (integers.astype(np.float64) - output.zero_point) * output.scale
    top1 = float(np.mean(expected.argmax(axis=1) == found.argmax(axis=1)))
    if _are_probabilities(expected):
        one, other = expected, np.maximum(found, output.scale / 2)
    else:
        one, other = _softmax(expected), _softmax(found)
    return Agreement(samples=count, top1=top1, kld_mean=max(0.0, float(_divergence(one, other).mean())))


def _are_probabilities(scores: Floats) -> bool:
    return bool((scores >= 0).all() and np.allclose(scores.sum(axis=1), 1, atol=ONE))


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Floats = powers / powers.sum(axis=1, keepdims=True)
    return found


def _divergence(one: Floats, other: Floats) -> Floats:
    """Of each row, in nats, after both are scaled to a sum of 1."""
    one, other = (each / each.sum(axis=1, keepdims=True) for each in (one, other))
    terms = np.where(
        one > 0, one * (np.log(np.maximum(one, 1e-300)) - np.log(np.maximum(other, 1e-300))), 0.0
    )
    found: Floats = terms.sum(axis=1)
    return found
