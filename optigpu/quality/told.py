"""The divergence from a next-token distribution of which a server tells only some tokens: bounds below and above.

P is the reference, Q the server's distribution, S the tokens that the server returned, and p and q what P and Q give to
all other tokens together: the rest, one bucket.

Below. Merging tokens never makes two distributions differ more (the data processing inequality, which is the log sum
inequality here: Cover and Thomas, Elements of Information Theory, 2006, theorem 2.7.1), so that

    D(P||Q) >= sum over S of P_i log(P_i / Q_i) + p log(p / q).

It is reached where Q divides q among the rest as P divides p: nothing better is known without an assumption.

Above. What the rest adds is the sum of P_j log(P_j / Q_j) over the tokens outside of S. It has no bound: as one Q_j
goes to 0 it grows without end, and that Q_j is at most the smallest probability that was returned bounds it on the
other side only. With the assumption that log(P_j / Q_j) is, on average over the rest by P, at most log R,

    D(P||Q) <= sum over S of P_i log(P_i / Q_i) + p log R.

R is the largest ratio that is known over all positions: P_i / Q_i of a returned token; p / q, which some token of the
rest reaches; and P_j / m of a token that was not returned, where m is the smallest probability that was. Where all
tokens are returned p is 0, nothing is assumed, and both bounds are the divergence.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.divergence import Agreement, Array, Logits, log_probabilities
from optigpu.quality.passages import Passage

ROUNDING = 1e-6
"""Probabilities that were rounded to float32 add up to 1 but for less than this."""
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
    """The reference at such a position: log-probabilities `logs` [k] of the tokens that were told, the probability of
    all others together, `rest`, and of the largest of them, `outside`; and the most likely token."""

    logs: Array
    rest: float
    outside: float
    first: int | None


def expected_by_logits(logits: Logits, told: Told) -> Expected:
    """From the reference's `logits` [vocabulary]. Raises OptiGPUError for NaN or infinity."""
    logs = log_probabilities(logits)
    others = np.exp(logs)
    others[told.tokens] = 0.0
    return Expected(logs[told.tokens], float(others.sum()), float(others.max()), int(logs.argmax()))


def expected_by_told(theirs: Told, told: Told) -> tuple[Expected, Told]:
    """From what another server told at the same position: with the tokens that both told."""
    _, mine, its = np.intersect1d(told.tokens, theirs.tokens, return_indices=True)
    outside = np.delete(np.exp(theirs.logs), its)
    rest = max(1.0 - float(np.exp(theirs.logs[its]).sum()), 0.0)
    both = told._replace(tokens=told.tokens[mine], logs=told.logs[mine])
    return Expected(theirs.logs[its], rest, float(outside.max(initial=0.0)), theirs.first), both


@dataclass
class Bounded:
    """Both bounds of the divergence, and agreement, over positions in the order in which they were added."""

    low: Agreement = field(default_factory=Agreement)
    ratio: float = 1.0
    left_out: int = 0
    _parts: list[float] = field(default_factory=list)
    _rests: list[float] = field(default_factory=list)

    def add(self, expected: Expected, told: Told) -> None:
        """Adds a position; one whose most likely token is not known counts as left out."""
        if told.first is None or expected.first is None or not len(told.tokens):
            self.left_out += 1
            return
        weights, found = np.exp(expected.logs), np.exp(told.logs)
        part, rest = float((weights * (expected.logs - told.logs)).sum()), expected.rest
        others = max(1.0 - float(found.sum()), 0.0) + ROUNDING
        bucket = rest * float(np.log(rest / others)) if rest > 0 else 0.0
        # A target that was told although it is unlikely says nothing of the others.
        told_first = found[told.tokens != told.target] if len(found) > 1 else found
        known = float(np.exp((expected.logs - told.logs).max()))
        self.ratio = max(self.ratio, known, rest / others, expected.outside / float(told_first.min()))
        self.low.append(max(part + bucket, 0.0), told.first == expected.first, told.position)
        self._parts.append(part)
        self._rests.append(rest)

    @property
    def high(self) -> Agreement:
        """The same positions with the bound from above."""
        found = Agreement()
        for low, part, rest, agrees, position in self._rows():
            found.append(max(part + rest * float(np.log(self.ratio)), low), agrees, position)
        return found

    @property
    def rest(self) -> float:
        """The mean probability that the reference gives to tokens that were not told."""
        return float(np.mean(self._rests)) if self._rests else 0.0

    def _rows(self) -> Iterator[tuple[float, float, float, bool, int]]:
        low = self.low
        columns = (low.divergences, self._parts, self._rests, low.agreeing, low.positions)
        return zip(*(np.asarray(column).tolist() for column in columns), strict=True)
