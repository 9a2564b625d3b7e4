"""What the model must beat: n-gram models over the same tokens, which know how often, but not what it is about."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.bundled_model.text import VOCABULARY, Tokens

Floats = NDArray[np.float64]


class Unigram:
    """Each token by its frequency in the training text, add-one smoothed: it gives every token a probability."""

    def __init__(self, train: Tokens, vocabulary: int = VOCABULARY) -> None:
        counts = np.bincount(train, minlength=vocabulary) + 1
        self._probability: Floats = counts / counts.sum()

    def probabilities(self, tokens: Tokens) -> Floats:
        """The probability of every token but the first, [n - 1]."""
        return self._probability[tokens[1:]]


class Trigram:
    """Interpolated Kneser-Ney with one discount for each order, D = n1 / (n1 + 2 n2).

    Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling, 1999, section 2.7. The
    lower orders count contexts, not occurrences; the lowest is interpolated with the uniform distribution.
    """

    def __init__(self, train: Tokens, vocabulary: int = VOCABULARY) -> None:
        size = vocabulary
        triples, occurrences = np.unique(
            (train[:-2] * size + train[1:-1]) * size + train[2:], return_counts=True
        )
        pairs, before_pair = np.unique(triples % size**2, return_counts=True)
        singles, before_single = np.unique(pairs % size, return_counts=True)
        self._size = size
        self._triples = _order(triples, occurrences, size)
        self._pairs = _order(pairs, before_pair, size)
        self._singles = _order(singles, before_single, size)

    def probabilities(self, tokens: Tokens) -> Floats:
        """The probability of every token but the first, [n - 1]; the second has one token before it, the others two."""
        one, size = tokens[1:], self._size
        pair = tokens[:-1] * size + one
        triple = np.concatenate([[-1], tokens[:-2] * size**2 + pair[1:]])
        context = np.concatenate([[-1], pair[:-1]])
        found = self._singles.interpolate(one, np.zeros_like(one), np.full(len(one), 1 / size))
        found = self._pairs.interpolate(pair, tokens[:-1], found)
        return self._triples.interpolate(triple, context, found)


@dataclass(frozen=True)
class _Order:
    """One order's counts: of each n-gram, and of each context the total and the number of n-grams."""

    grams: Tokens
    counts: Floats
    contexts: Tokens
    totals: Floats
    followers: Floats
    discount: float

    def interpolate(self, gram: Tokens, context: Tokens, lower: Floats) -> Floats:
        """Discounted frequency plus the discounted mass shared out as `lower` says; `lower` where nothing is known."""
        count = _look_up(gram, self.grams, self.counts)
        total = _look_up(context, self.contexts, self.totals)
        followers = _look_up(context, self.contexts, self.followers)
        seen = total > 0
        discounted = np.maximum(count - self.discount, 0) + self.discount * followers * lower
        return np.where(seen, discounted / np.where(seen, total, 1), lower)


def _order(grams: Tokens, counts: NDArray[np.int64], size: int) -> _Order:
    contexts, first, followers = np.unique(grams // size, return_index=True, return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return _Order(
        grams=grams,
        counts=counts.astype(np.float64),
        contexts=contexts,
        totals=np.add.reduceat(counts, first).astype(np.float64),
        followers=followers.astype(np.float64),
        discount=once / (once + 2 * twice) if once else 0.5,
    )


def _look_up(wanted: Tokens, known: Tokens, values: Floats) -> Floats:
    """The value of each wanted key, 0 where it is not known. `known` is sorted."""
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, values[place], 0.0)
