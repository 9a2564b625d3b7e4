"""Quantiles of Student's t for any degrees of freedom of at least 1, fractions included. Pure numpy."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STEPS = 4000
_MOST_FREEDOM = 1000.0
"""Beyond it t is the normal distribution to three digits."""


def t_quantile(probability: float, freedom: float) -> float:
    """The value below which t with so much freedom lies with `probability` (above a half), to four digits."""
    return _quantile(probability, round(min(freedom, _MOST_FREEDOM), 2))


def t_quantiles(probability: float, freedom: Array) -> Array:
    """`t_quantile` of each of `freedom` [...]."""
    if freedom.ndim == 0:
        return np.asarray(t_quantile(probability, float(freedom)))
    known, where = np.unique(np.round(np.minimum(freedom, _MOST_FREEDOM), 2), return_inverse=True)
    return np.array([_quantile(probability, each) for each in known.tolist()])[where].reshape(freedom.shape)


@lru_cache(maxsize=8192)
def _quantile(probability: float, freedom: float) -> float:
    """With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle) ** (freedom - 1)."""
    # Beyond ten standard deviations of the angle there is nothing of a narrow density.
    last = min(math.pi / 2, 10 / math.sqrt(freedom))
    angles = np.linspace(0.0, last, _STEPS + 1)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1]))) * (last / _STEPS / 2)
    half = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)) * math.sqrt(math.pi) / 2
    angle = float(np.interp((2 * probability - 1) * half, area, angles))
    return math.sqrt(freedom) * math.tan(angle)
