"""Compares the outputs of two prepared models: logits, the tokens that a decode loop chose, and losses of training."""

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import DecodingRuntime, Ids, Images, Logits, PassRuntime, ReferenceRuntime
from optigpu.backends.training import TrainingRuntime
from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.selftest.setting import SEED
from optigpu.vocabulary import ReplicateError, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.requests.decoding import drawn_ids
from optigpu.workloads.train_step import DrawnTexts, TrainStep

Steps = NDArray[np.float32]
"""Logits of several decode steps, [steps, batch, vocabulary]."""


class Decoded:
    """What the unmodified model decodes greedily after drawn prompts, and its logits on the way."""

    def __init__(self, plain: DecodingRuntime, workload: Generate) -> None:
        self._plain, self._new_tokens = plain, workload.new_tokens
        assert workload.prompt_tokens is not None  # its prompts are random
        shape = (workload.batch_size, workload.prompt_tokens)
        self._prompt = drawn_ids(np.random.default_rng(SEED), plain.facts, shape)
        self._tokens = plain.generate(self._prompt, self._new_tokens).tokens
        self._logits = _stacked(plain.score(self._given(self._tokens), self._prefill))

    def error_of(self, changed: DecodingRuntime, *, own_loop: bool) -> float:
        """The largest error of a logit, as a share of the largest logit; NaN if there is one. With `own_loop` the stack
        replaces the decode loop, by one that may give no logits: then the model's own count. Half of what a chosen
        token is behind the best one counts as an error of its logit: a greedy choice from logits that are off by so
        much explains it. Raises ReplicateError for a wrong number of tokens."""
        found = self._generated(changed)
        logits = _stacked(self._scored(changed, own_loop))
        errors = np.abs(logits - self._logits).max() / self._largest, self._behind(found) / 2 / self._largest
        return float(np.max(errors))  # NaN if there is one

    def error_of_tokens(self, changed: DecodingRuntime) -> float:
        """The same of the tokens alone, for an engine that gives no logits. Raises ReplicateError for a wrong number of
        tokens."""
        return self._behind(self._generated(changed)) / 2 / self._largest

    def error_of_whole_passes(self, other: ReferenceRuntime) -> float:
        """The same of logits by passes over the whole sequence, without a cache or a decode step."""
        logits = _stacked(other.whole(self._given(self._tokens), self._prefill))
        return float(np.abs(logits - self._logits).max() / self._largest)

    def _generated(self, changed: DecodingRuntime) -> Ids:
        found = changed.generate(self._prompt, self._new_tokens).tokens
        if found.shape != self._tokens.shape:
            raise ReplicateError(f"It decoded tokens of shape {found.shape} instead of {self._tokens.shape}.")
        return found

    def _scored(self, changed: DecodingRuntime, own_loop: bool) -> Iterable[Logits]:
        given = self._given(self._tokens)
        try:
            return list(changed.score(given, self._prefill))
        except UnsupportedError:
            if not (own_loop and isinstance(changed, ReferenceRuntime)):
                raise
            return changed.whole(given, self._prefill)

    @property
    def _largest(self) -> float:
        return float(np.abs(self._logits).max())

    @property
    def _prefill(self) -> int:
        return int(self._prompt.shape[1]) - 1

    def _given(self, tokens: Ids) -> Ids:
        """What the model has seen before it chooses the last token."""
        return np.concatenate([self._prompt, tokens], axis=1)[:, :-1]

    def _behind(self, tokens: Ids) -> float:
        """By how much, at most, the unmodified model prefers another token to the one that was chosen."""
        if np.array_equal(tokens, self._tokens):
            return 0.0
        if tokens.min() < 0 or tokens.max() >= self._logits.shape[-1]:
            raise ReplicateError("It decoded a token that the model does not have.")
        logits = _stacked(self._plain.score(self._given(tokens), self._prefill))
        chosen = np.take_along_axis(logits, tokens.T[..., None], axis=-1)[..., 0]
        return float((logits.max(axis=-1) - chosen).max())


class Passed:
    """What the unmodified model makes of drawn inputs in one pass."""

    def __init__(self, plain: PassRuntime, workload: Prefill | Classify) -> None:
        self._inputs = _inputs(plain, workload)
        self._logits = plain.forward(self._inputs).logits

    def error_of(self, changed: PassRuntime) -> float:
        """The largest error of a logit, as a share of the largest logit; NaN if there is one."""
        found = changed.forward(self._inputs).logits
        if found.shape != self._logits.shape:
            raise ReplicateError(f"It gave logits of shape {found.shape} instead of {self._logits.shape}.")
        return float(np.abs(found - self._logits).max() / np.abs(self._logits).max())


STEPS = 3


class Learned:
    """The losses of the plain model over STEPS steps with drawn documents, some of them shorter than a row."""

    def __init__(self, plain: TrainingRuntime, workload: TrainStep) -> None:
        texts, shortest = DrawnTexts(cast(ModelFacts, plain.facts), SEED), workload.sequence_tokens // 2
        self._batches = [
            texts.batch(workload.batch_size, workload.sequence_tokens, shortest) for _ in range(STEPS)
        ]
        self._trained = _trained(plain)
        self._norm = plain.gradient_norm(self._batches[0])
        self._losses = self._losses_of(plain)

    def error_of(self, changed: TrainingRuntime) -> float:
        """The largest error of a loss, as a share of it; NaN if there is one. Where the same number of weights is
        trained, the error of the gradient's norm counts too."""
        errors = []
        if _trained(changed) == self._trained:
            errors.append(abs(changed.gradient_norm(self._batches[0]) / self._norm - 1))
        losses = self._losses_of(changed)
        return float(np.max([*errors, *np.abs(losses / self._losses - 1)]))

    def _losses_of(self, runtime: TrainingRuntime) -> NDArray[np.float64]:
        return np.array([runtime.step(batch).loss for batch in self._batches])


def _trained(runtime: TrainingRuntime) -> int | None:
    weights = runtime.weights()
    return weights.trainable if weights else None


def _stacked(logits: Iterable[Logits]) -> Steps:
    return np.stack(list(logits))


def _inputs(plain: PassRuntime, workload: Prefill | Classify) -> Ids | Images:
    source = np.random.default_rng(SEED)
    if isinstance(workload, Prefill):
        decoder = cast(ModelFacts, plain.facts)
        return drawn_ids(source, decoder, (workload.batch_size, workload.prompt_tokens))
    facts = cast(ImageFacts, plain.facts)
    shape = (workload.batch_size, facts.channels, facts.image_size, facts.image_size)
    return source.standard_normal(shape, np.float32)
