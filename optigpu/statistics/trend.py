"""Whether a series grows: Mann and Kendall's test, and Theil and Sen's slope. Pure numpy.

Sources: Mann, Nonparametric Tests Against Trend, 1945; Sen, Estimates of the Regression Coefficient Based on Kendall's
Tau, 1968.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def growth_risk(values: Array) -> float:
    """The probability that chance alone makes independent `values` [n] grow as steadily as these, by the normal
    approximation with ties; 1 for fewer than 4."""
    n = len(values)
    if n < 4:
        return 1.0
    later, earlier = np.triu_indices(n, 1)[::-1]
    score = float(np.sign(values[later] - values[earlier]).sum())
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if score <= 0 or variance <= 0:
        return 1.0
    return math.erfc((score - 1) / math.sqrt(2 * variance)) / 2


def slope(moments: Array, values: Array) -> float:
    """The median of the slopes between all pairs of points, of `values` [n] at growing `moments` [n]."""
    later, earlier = np.triu_indices(len(values), 1)[::-1]
    return float(np.median((values[later] - values[earlier]) / (moments[later] - moments[earlier])))
