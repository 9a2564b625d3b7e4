"""Means over independent units with Student's t: one sample, pairs, and two samples of unequal spread (Welch).

Everything works along the last axis, so that one call serves one sample or thousands.

Student, The Probable Error of a Mean, 1908; Welch, The Generalization of "Student's" Problem when Several Different
Population Variances are Involved, 1947.
"""

from dataclasses import dataclass

import numpy as np

from optigpu.statistics.student import Array, t_quantiles


@dataclass(frozen=True)
class Estimate:
    """A centre and its standard error, [...] each: (centre - truth) / error is Student's t with so much freedom.

    The truth may lie as much as `below` or `above` the centre in addition: what disturbed a measurement moves it to one
    side, and more samples do not show by how much.
    """

    centre: Array
    error: Array
    freedom: Array
    below: float = 0.0
    above: float = 0.0

    def bounds(self, confidence: float = 0.95) -> tuple[Array, Array]:
        """The two-sided interval."""
        half = t_quantiles((1 + confidence) / 2, self.freedom) * self.error
        return self.centre - half - self.below, self.centre + half + self.above

    def upper(self, confidence: float = 0.95) -> Array:
        """The one-sided bound."""
        return np.asarray(self.centre + t_quantiles(confidence, self.freedom) * self.error + self.above)


def mean_of(units: Array) -> Estimate:
    """The mean of `units` [..., units], two at least. For pairs: of their differences."""
    count = units.shape[-1]
    centre = units.mean(axis=-1)
    error = units.std(axis=-1, ddof=1) / np.sqrt(count)
    return Estimate(np.asarray(centre), np.asarray(error), np.full(np.shape(centre), count - 1.0))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """First minus second, of independent samples that may vary differently.

    The degrees of freedom are Welch's own; Satterthwaite's, which became the custom, are too few for 2 or 3 units: the
    interval would hold in 98%.
    """
    variances = first.error**2, second.error**2
    total = (variances[0] + variances[1]) ** 2
    spread = variances[0] ** 2 / (first.freedom + 2) + variances[1] ** 2 / (second.freedom + 2)
    least = np.array(np.minimum(first.freedom, second.freedom), dtype=np.float64)
    freedom = np.divide(total, spread, out=np.array(least + 2), where=spread > 0) - 2
    return Estimate(
        first.centre - second.centre,
        np.sqrt(variances[0] + variances[1]),
        np.maximum(freedom, least),
        below=first.below + second.above,
        above=first.above + second.below,
    )
