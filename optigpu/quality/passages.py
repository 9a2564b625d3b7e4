"""Passages: runs of tokens of which the last ones are predicted, in batches of the timed size.

For perplexity windows overlap: each token but the first is predicted once, from as many tokens before it as its window
holds (Hugging Face, Perplexity of fixed-length models, huggingface.co/docs/transformers/perplexity).
"""

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from optigpu.vocabulary import OptiGPUError

Ids = NDArray[np.int64]
Score = Callable[[Ids, int], Iterator[NDArray[np.float32]]]
"""`score(tokens, prefill)`: logits [batch, vocabulary] after each of `tokens` [batch, length] from `prefill` on."""

Predicted = TypeVar("Predicted")
FEWEST = 32
"""Positions that are predicted however long that takes."""


@dataclass(frozen=True)
class Passage:
    """`tokens` [length]; those from index `first` (at least 1) on are predicted from all tokens before them."""

    tokens: Ids
    first: int

    @property
    def positions(self) -> int:
        return len(self.tokens) - self.first


def after(start: Ids, passage: Passage) -> Passage:
    """The passage after the tokens that its model expects before every text; without them some predict anything."""
    return Passage(np.concatenate([start, passage.tokens]), len(start) + passage.first)


class Prediction(NamedTuple):
    """`logits` [vocabulary] for the token `target`, the `position`-th predicted token of all passages."""

    position: int
    target: int
    logits: NDArray[np.float32]


def predictions(passages: Sequence[Passage], batch: int, score: Score) -> Generator[Prediction, None, None]:
    """All predictions, of `batch` passages at a time; shorter passages are filled with zeros behind."""
    offset = 0
    for start in range(0, len(passages), batch):
        group = passages[start : start + batch]
        offsets = offset + np.cumsum([0, *(passage.positions for passage in group)])
        offset = int(offsets[-1])
        tokens, prefill = scored_at_once(group, batch)
        for target, logits in enumerate(score(tokens, prefill), start=prefill + 1):
            for row, passage in enumerate(group):
                if passage.first <= target < len(passage.tokens):
                    position = int(offsets[row]) + target - passage.first
                    yield Prediction(position, int(passage.tokens[target]), logits[row])


def scored_at_once(passages: Sequence[Passage], batch: int) -> tuple[Ids, int]:
    """What `score` is given for `batch` passages, or fewer: tokens [batch, length] and the length of the prefill."""
    tokens = np.zeros((batch, max(len(passage.tokens) for passage in passages) - 1), np.int64)
    for row, passage in enumerate(passages):
        # The last token is predicted and predicts nothing.
        tokens[row, : len(passage.tokens) - 1] = passage.tokens[:-1]
    return tokens, min(passage.first for passage in passages) - 1


def within(made: Generator[Predicted, None, None], seconds: float) -> Iterator[Predicted]:
    """The predictions that are made within so many seconds, and FEWEST of them in any case."""
    ends = time.monotonic() + seconds
    with closing(made):
        for count, prediction in enumerate(made, start=1):
            yield prediction
            if count >= FEWEST and time.monotonic() > ends:
                return


def pack(passages: Sequence[Passage]) -> dict[str, Ids]:
    return {
        "tokens": np.concatenate([passage.tokens for passage in passages]),
        "lengths": np.array([len(passage.tokens) for passage in passages], np.int64),
        "firsts": np.array([passage.first for passage in passages], np.int64),
    }


def unpack(arrays: Mapping[str, Ids]) -> list[Passage]:
    ends = np.cumsum(arrays["lengths"])
    pieces = np.split(arrays["tokens"], ends[:-1])
    return [Passage(tokens, int(first)) for tokens, first in zip(pieces, arrays["firsts"], strict=True)]


def digest_of(passages: Sequence[Passage]) -> str:
    """SHA-256 of the passages in hexadecimal: equal for equal tokens with equal predicted positions."""
    found = hashlib.sha256()
    for name, array in pack(passages).items():
        found.update(name.encode())
        found.update(array.astype("<i8").tobytes())
    return found.hexdigest()


_MOST_NATS = 700.0  # the exponential of more overflows float64


def windows(tokens: Ids, window: int, stride: int) -> list[Passage]:
    """Passages of up to `window` of the `tokens`, `stride` (fewer) apart. Raises OptiGPUError for less than one
    window."""
    if len(tokens) < window:
        raise OptiGPUError(
            f"The text has {len(tokens)} tokens, fewer than one window of {window}; choose a longer text, or a smaller "
            "quality.window."
        )
    passages, predicted = [], 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        passages.append(Passage(tokens[begin:end], predicted - begin))
        predicted = end
        if end == len(tokens):
            break
    return passages


def perplexity(log_likelihoods: NDArray[np.float64]) -> float:
    """exp of the mean negative log-likelihood in nats. Raises OptiGPUError if it is not finite."""
    nats = -float(np.mean(log_likelihoods))
    if not nats <= _MOST_NATS:
        raise OptiGPUError(
            f"The mean negative log-likelihood is {nats:.3g} nats, too large for a perplexity."
        )
    return math.exp(nats)
