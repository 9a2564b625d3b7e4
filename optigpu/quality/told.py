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
decides what is known, which then counts at that position alone. Where all tokens are returned p is 0 and nothing is
assumed.

Rounding. A server adds the exponentials of its logits in float32. Of n additions in a row each is wrong by at most
2^-24 of the sum (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2), and all log-probabilities
that it tells are too large or too small by the same, up to n 2^-24: 0.003 nat where a vocabulary of 49,152 is added one
by one. Each is also rounded by itself, by at most ROUNDING. By the chain rule (Cover and Thomas, theorem 2.5.3) the
bound below is P(S) K + d(P(S), Q(S)): K is the divergence among the tokens of S, which no common factor changes, and d
that of two buckets. K may be 2 ROUNDING too large, and d is taken where Q(S), as it can be, is nearest to P(S). The
bound above is raised by all of it. Where all tokens are told their sum shows the common factor: both bounds are the
divergence, to 2 ROUNDING.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.divergence import Agreement, Array, Logits, log_probabilities
from optigpu.quality.passages import Passage
from optigpu.vocabulary import OptiGPUError

ROUNDING = 1e-5
"""In nats: what float32 makes of one log-probability down to LEAST_LOG, apart from the sum: a difference, an
exponential, a quotient and a logarithm, each by a few 2^-24 of at most 80."""
SUMMING = 2.0**-24
"""The most that one addition in float32 is wrong by, as a share of the sum."""
LEAST_REST = 1e-3
"""The probability of the rest from which on what is known at a position counts at all positions."""
LEAST_LOG = -80.0
"""In nats: servers write what is less likely as 0, or as a number that stands for it."""


class Told(NamedTuple):
    """What a server tells for the token `target`, the `position`-th predicted token of all passages: log-probabilities
    `logs` [k] in nats of `tokens` [k], of which all may be too large or too small by the same, up to `common`. `first`
    is the most likely one, None where its id is not known."""

    position: int
    target: int
    tokens: NDArray[np.int64]
    logs: Array
    first: int | None
    common: float

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
    it is not known; the most likely token; and what `logs` are rounded by, all by the same and each."""

    logs: Array
    rest: float
    outside: float
    first: int | None
    common: float = 0.0
    rounding: float = 0.0


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
    return Expected(theirs.logs[its], rest, -np.inf, theirs.first, theirs.common, ROUNDING), both


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
        weights, rest, each = np.exp(expected.logs), expected.rest, expected.rounding + ROUNDING
        parts = weights * (expected.logs - told.logs)
        part, share, total = float(parts.sum()), float(weights.sum()), float(np.exp(told.logs).sum())
        others = _others(told.common + ROUNDING, total, 1.0 - total)
        if others[1] <= 0:
            raise OptiGPUError(f"Probabilities that the server told at one position add up to {total:.4f}.")
        among = max(part + share * (np.log(total / share) - 2 * each), 0.0)
        low = np.exp(-expected.common) * among + _buckets(
            _others(expected.common + expected.rounding, share, rest), others
        )
        # The target is told even where it is unlikely, and then bounds no other token.
        least = float(told.logs[told.tokens != told.target].min(initial=0.0))
        half = told.logs <= np.median(told.logs)
        tail = float(parts[half].sum() / weights[half].sum())
        bucket = float(np.log(rest / others[1])) if rest > 0 else 0.0
        known = max(tail, bucket, expected.outside - least)
        if rest >= LEAST_REST:
            self.assumed = max(self.assumed, known)
        self.low.append(float(low), told.first == expected.first, told.position)
        self._parts.append((part + told.common + expected.common + 2 * each, rest, known))

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


def _others(rounding: float, told: float, rest: float) -> tuple[float, float]:
    """The least and the most that all tokens have that were not told, where logs of the others, whose probabilities add
    up to `told`, are off by at most `rounding`; `rest` is what is left by them."""
    return max(rest - told * float(np.expm1(rounding)), 0.0), min(
        rest - told * float(np.expm1(-rounding)), 1.0
    )


def _buckets(expected: tuple[float, float], found: tuple[float, float]) -> float:
    """The least divergence of two buckets of which the second has something within these limits."""
    if expected[0] <= found[1] and found[0] <= expected[1]:
        return 0.0
    p, q = (expected[0], found[1]) if expected[0] > found[1] else (expected[1], found[0])
    return float(sum(a * np.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0))
