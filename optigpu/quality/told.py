"""The divergence from a next-token distribution of which a server tells only some tokens: bounds below and above.

P is the reference, Q the server's distribution, S the tokens that the server returned, and p and q what P and Q give to
all other tokens together: the rest, one bucket.

Below. Merging tokens never makes two distributions differ more (the data processing inequality, which is the log sum
inequality here: Cover and Thomas, Elements of Information Theory, 2006, theorem 2.7.1), so that

    D(P||Q) >= sum over S of P_i log(P_i / Q_i) + p log(p / q).

It is reached where Q divides q among the rest as P divides p: nothing better is known without an assumption.

Above. What the rest adds is the sum of P_j log(P_j / Q_j) over the tokens outside of S. It has no bound: as one Q_j
goes to 0 it grows without end, and that Q_j is at most the smallest probability m that was returned bounds it on the
other side only. With the assumption that the mean of log(P_j / Q_j) over the rest, weighted by P, is at most L,

    D(P||Q) <= sum over S of P_i log(P_i / Q_i) + p L.

L is the largest of what is known of such means at any position, and at each position no less than what is known there:
the mean over the less likely half of the returned tokens; log(p / q), which the mean over the rest is not below (the
same inequality); and the mean of log(P_j / m), which it is not below either. Where p is below a thousandth rounding
decides what is known, which then counts at that position alone. Where all tokens are returned p is 0, nothing is
assumed, and both bounds are the divergence.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.divergence import Agreement, Array, Logits, log_probabilities
from optigpu.quality.passages import Passage
from optigpu.vocabulary import OptiGPUError

ROUNDING = 1e-6
"""Probabilities that were rounded to float32 add up to 1 but for less than this."""
LEAST_REST = 1e-3
"""The probability of the rest from which on what is known at a position counts at all positions."""
LEAST_LOG = -80.0
"""In nats: servers write what is less likely as 0, or as a number that stands for it."""


class Told(NamedTuple):
    """What a server tells for the token `target`, the `position`-th predicted token of all passages: log-probabilities
    `logs` [k] in nats of `tokens` [k]. `first` is the most likely one, None where its id is not known."""

    position: int
    target: int
    tokens: NDArray[np.int64]
    logs: Array
    first: int | None

    @property
    def log_likelihood(self) -> float:
        """Of the target; minus infinity where it was not told."""
        found = self.logs[self.tokens == self.target]
        return float(found[0]) if len(found) else -np.inf


@dataclass(frozen=True)
class Telling:
    """A server that tells log-probabilities: by which interface, of how many tokens at each position, and whether its
    tokens are those of the job's model. `told(passages, targets)` gives what it tells of each predicted token, in their
    order; with `targets` it asks for more where that token itself is not told. Raises OptiGPUError for an answer
    without any."""

    label: str
    most: int
    vocabulary: str
    told: Callable[[Sequence[Passage], bool], Generator[Told, None, None]]


class Expected(NamedTuple):
    """The reference at such a position: log-probabilities `logs` [k] of the tokens that were told; the probability of
    all others together, `rest`, and the mean of their log-probabilities weighted by it, `outside`, minus infinity where
    it is not known; and the most likely token."""

    logs: Array
    rest: float
    outside: float
    first: int | None


def expected_by_logits(logits: Logits, told: Told) -> Expected:
    """From the reference's `logits` [vocabulary]. Raises OptiGPUError for NaN or infinity."""
    logs = log_probabilities(logits)
    others = np.delete(logs, told.tokens)
    rest = float(np.exp(others).sum())
    outside = float((np.exp(others) * others).sum()) / rest if rest > 0 else -np.inf
    return Expected(logs[told.tokens], rest, outside, int(logs.argmax()))


def expected_by_told(theirs: Told, told: Told) -> tuple[Expected, Told]:
    """From what another server told at the same position: with the tokens that both told."""
    _, mine, its = np.intersect1d(told.tokens, theirs.tokens, return_indices=True)
    rest = max(1.0 - float(np.exp(theirs.logs[its]).sum()), 0.0)
    both = told._replace(tokens=told.tokens[mine], logs=told.logs[mine])
    return Expected(theirs.logs[its], rest, -np.inf, theirs.first), both


@dataclass
class Bounded:
    """Both bounds of the divergence, and agreement, over positions in the order in which they were added. `assumed` is
    L; positions whose most likely token is not known are `left_out`."""

    low: Agreement = field(default_factory=Agreement)
    assumed: float = 0.0
    left_out: int = 0
    _parts: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, expected: Expected, told: Told) -> None:
        """Adds a position. Raises OptiGPUError for what is no part of a distribution."""
        if told.first is None or expected.first is None or not len(told.tokens):
            self.left_out += 1
            return
        weights, rest = np.exp(expected.logs), expected.rest
        parts = weights * (expected.logs - told.logs)
        total = float(np.exp(told.logs).sum())
        if total > 1.0 + 1000 * ROUNDING:
            raise OptiGPUError(f"Probabilities that the server told at one position add up to {total:.4f}.")
        others = max(1.0 - total, 0.0) + ROUNDING
        bucket = float(np.log(rest / others)) if rest > 0 else 0.0
        # The target is told even where it is unlikely, and then bounds no other token.
        least = float(told.logs[told.tokens != told.target].min(initial=0.0))
        half = told.logs <= np.median(told.logs)
        tail = float(parts[half].sum() / weights[half].sum())
        part = float(parts.sum())
        known = max(tail, bucket, expected.outside - least)
        if rest >= LEAST_REST:
            self.assumed = max(self.assumed, known)
        self.low.append(max(part + rest * bucket, 0.0), told.first == expected.first, told.position)
        self._parts.append((part, rest, known))

    @property
    def high(self) -> Agreement:
        """The same positions with the bound from above."""
        found, low = Agreement(), self.low
        columns = (low.divergences.tolist(), low.agreeing.tolist(), low.positions.tolist(), self._parts)
        for least, agrees, position, (part, rest, known) in zip(*columns, strict=True):
            found.append(max(part + rest * max(self.assumed, known), least), agrees, position)
        return found

    @property
    def rest(self) -> float:
        """The mean probability that the reference gives to tokens that were not told."""
        return float(np.mean([rest for _, rest, _ in self._parts] or 0.0))
