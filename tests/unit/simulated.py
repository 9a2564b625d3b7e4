"""Simulated requests with a known truth: correlated, spread between processes, and heavy-tailed."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tail = Literal["normal", "lognormal", "t3"]

TRUE = 100.0
TAILS: tuple[Tail, ...] = ("normal", "lognormal", "t3")
_BURN_IN = 60
"""Of heavy tails; a normal autoregression may begin as it goes on."""


def noise(rng: np.random.Generator, tail: Tail, shape: tuple[int, ...]) -> Array:
    """Independent numbers with median 0; "lognormal" means that their exponentials are wanted."""
    return rng.standard_t(3, shape) if tail == "t3" else rng.normal(size=shape)


def series(rng: np.random.Generator, tail: Tail, draws: int, requests: int, correlation: float) -> Array:
    """First-order autoregressions, [draws, requests], with the spread of independent noise."""
    if correlation == 0:
        return noise(rng, tail, (draws, requests))
    burn_in = _BURN_IN if tail == "t3" else 0
    shocks = noise(rng, tail, (requests + burn_in, draws))
    values = np.empty_like(shocks)
    values[0] = shocks[0] / np.sqrt(1 - correlation**2)
    for i in range(1, len(shocks)):
        values[i] = correlation * values[i - 1] + shocks[i]
    return np.asarray(values[burn_in:].T * np.sqrt(1 - correlation**2))


def positive(tail: Tail, deviations: Array) -> Array:
    """Times around TRUE: 1% for each deviation, or a factor of e ** 0.3."""
    if tail == "normal":
        return TRUE + deviations
    return np.asarray(TRUE * np.exp((0.3 if tail == "lognormal" else 0.01) * deviations))


def requests(
    rng: np.random.Generator,
    tail: Tail,
    shape: tuple[int, int, int],
    between: float,
    correlation: float = 0.0,
) -> Array:
    """Requests [draws, processes, requests]; `between` is the spread of processes in terms of that within them."""
    draws, processes, count = shape
    within = series(rng, tail, draws * processes, count, correlation).reshape(shape)
    centres = noise(rng, tail, (draws, processes, 1))
    return positive(tail, (between * centres + within) / np.hypot(1.0, between))


def coverage(bounds: tuple[Array, Array], truth: float) -> float:
    """The share of intervals that contain the truth."""
    low, high = bounds
    return float(np.mean((low <= truth) & (truth <= high)))
