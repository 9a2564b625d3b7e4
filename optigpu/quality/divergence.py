"""Divergence of two next-token distributions, from their logits; sums are in float64."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optigpu.vocabulary import OptiGPUError

FLOAT_ERROR = 1e-5
"""In nats: the most that another order of float32 sums makes of the same model, with room (decision 40)."""

Array = NDArray[np.float64]
Logits = NDArray[np.floating[Any]]


def log_probabilities(logits: Logits) -> Array:
    """Log-probabilities [vocabulary] in nats by `logits` [vocabulary]. Raises OptiGPUError for NaN or infinity."""
    _require_finite(logits)
    shifted = np.float64(logits) - np.float64(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def log_likelihood(logits: Logits, target: int) -> float:
    """Log-probability of `target` by `logits` [vocabulary] in nats. Raises OptiGPUError for NaN or infinity."""
    return float(log_probabilities(logits)[target])


def divergence(reference: Logits, logits: Logits) -> Array:
    """Kullback-Leibler divergence of `logits` from `reference`, both [..., vocabulary], in nats, [...].

    D(P||Q) = sum p (log p - log q), P the reference's distribution (Kullback and Leibler, On Information and
    Sufficiency, 1951). Raises OptiGPUError when a logit is NaN or infinite.
    """
    _require_finite(reference)
    _require_finite(logits)
    # A vocabulary may have 262,144 tokens: each distribution is exponentiated once.
    expected, found = (
        each - each.max(axis=-1, keepdims=True) for each in map(np.float64, (reference, logits))
    )
    weights = np.exp(expected)
    total = weights.sum(axis=-1)
    between = np.einsum("...i,...i->...", weights, expected - found) / total
    return np.asarray(np.maximum(between + np.log(np.exp(found).sum(axis=-1)) - np.log(total), 0.0))


@dataclass
class Agreement:
    """Divergence and agreement over positions, in the order in which they were added."""

    _divergences: "array[float]" = field(default_factory=lambda: array("d"))
    _agreeing: "array[int]" = field(default_factory=lambda: array("b"))
    _positions: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, reference: Logits, logits: Logits, position: int | None = None) -> None:
        """Adds a position, or the next one; both are [vocabulary]."""
        place = len(self._positions) if position is None else position
        agrees = bool(np.argmax(reference) == np.argmax(logits))
        self.append(float(divergence(reference, logits)), agrees, place)

    def append(self, divergence: float, agrees: bool, position: int) -> None:
        """Adds a position whose divergence is known."""
        self._divergences.append(divergence)
        self._agreeing.append(agrees)
        self._positions.append(position)

    def __len__(self) -> int:
        return len(self._divergences)

    @property
    def divergences(self) -> Array:
        return np.array(self._divergences, dtype=np.float64)

    @property
    def agreeing(self) -> NDArray[np.bool_]:
        return np.array(self._agreeing, dtype=np.bool_)

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.array(self._positions, dtype=np.int64)

    def metrics(self) -> dict[str, float]:
        """kld_mean, kld_p99 and top1_agreement. Raises OptiGPUError if there is no position."""
        if not self._divergences:
            raise OptiGPUError("No position was compared with the reference; ask for more quality.tokens.")
        return {
            "kld_mean": float(np.mean(self._divergences)),
            "kld_p99": float(np.quantile(self._divergences, 0.99)),
            "top1_agreement": sum(self._agreeing) / len(self),
        }

    def standard_error(self) -> float | None:
        """The standard error of kld_mean, as if positions were independent; None for a single one."""
        if len(self) < 2:
            return None
        return float(np.std(self._divergences, ddof=1) / np.sqrt(len(self)))


def _require_finite(logits: Logits) -> None:
    wrong = int((~np.isfinite(logits)).sum())
    if wrong:
        raise OptiGPUError(
            f"{wrong} of {logits.size} logits are NaN or infinite, so they form no distribution; use a stack "
            "with higher precision."
        )
