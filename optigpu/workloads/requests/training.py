"""Seeded samples to learn, and a step of training as a request."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.training import LabelledImages, Texts, TrainedStep, TrainingBatch, TrainingRuntime
from optigpu.documents.facts import TrainingFacts
from optigpu.documents.shapes import ImageFacts, ModelFacts
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Check

Draw = Callable[[], TrainingBatch]
"""Makes the samples of the next step."""

SUCCESSORS = 4
"""How many tokens can follow a token: a model that learns it has a loss of log(4) instead of log(vocabulary)."""


class DrawnTexts:
    """Documents of a language that can be learned: one of SUCCESSORS tokens follows each token, all as likely."""

    def __init__(self, facts: ModelFacts, seed: int) -> None:
        """The language is the same for every seed; the documents are not."""
        self._follow = np.random.default_rng(0).integers(
            facts.vocabulary, size=(facts.vocabulary, SUCCESSORS)
        )
        self._source = np.random.default_rng(seed)

    def batch(self, documents: int, length: int, shortest: int) -> Texts:
        """So many documents of `shortest` to `length` tokens each."""
        lengths = self._source.integers(shortest, length, size=documents, endpoint=True)
        return Texts(tuple(self._document(int(tokens)) for tokens in lengths), length)

    def _document(self, tokens: int) -> NDArray[np.int64]:
        chosen = self._source.integers(SUCCESSORS, size=tokens)
        found = np.empty(tokens, np.int64)
        found[0] = self._source.integers(len(self._follow))
        for place in range(1, tokens):
            found[place] = self._follow[found[place - 1], chosen[place]]
        return found


class DrawnImages:
    """Images that can be told apart: each is its class's pattern with as much noise added."""

    def __init__(self, facts: ImageFacts, side: int, seed: int) -> None:
        """The patterns are the same for every seed; the images are not."""
        self._facts, self._shape = facts, (facts.channels, side, side)
        self._source = np.random.default_rng(seed)

    def batch(self, images: int) -> LabelledImages:
        """So many images of classes that are drawn."""
        labels = self._source.integers(self._facts.classes, size=images)
        noise = self._source.standard_normal((images, *self._shape), np.float32)
        patterns = [np.random.default_rng(label).standard_normal(self._shape, np.float32) for label in labels]
        return LabelledImages(noise + np.stack(patterns), labels)


class TrainingRequest:
    """Steps of training, each over the next samples."""

    def __init__(
        self,
        runtime: TrainingRuntime,
        draw: Draw,
        metrics: Callable[[TrainingBatch, TrainedStep], Mapping[str, float]],
    ) -> None:
        """`draw` makes the next samples, `metrics` follow from a step over them."""
        self._runtime, self._draw, self._metrics = runtime, draw, metrics

    def run(self) -> Mapping[str, float]:
        """One timed step over samples that were drawn before it."""
        batch = self._draw()
        return self._metrics(batch, self._runtime.step(batch))

    def check(self) -> Check:
        """The loss of a step must be a number; so must the norm of its gradient, which is not 0."""
        batch = self._draw()
        step = self._runtime.step(batch)
        if not np.isfinite(step.loss):
            return Check(step.step_s, f"The loss of a step is {step.loss}.")
        norm = self._runtime.gradient_norm(batch)
        if not (np.isfinite(norm) and norm > 0):
            return Check(step.step_s, f"The norm of the gradient is {norm}; nothing can be learned from it.")
        return Check(step.step_s, details={"gradient_norm": norm})

    def observe(self) -> None:
        """Records the operations of a step, and what else only a step can show."""
        batch = self._draw()
        self._runtime.observe(batch)
        try:
            counted = self._runtime.step_flops(batch)
        except UnsupportedError as error:
            notes = self._runtime.notes
            notes.record(reasons={**notes.facts.get("reasons", {}), "training": str(error)})
            return
        facts = TrainingFacts(model_flops=counted.model, hardware_flops=counted.hardware)
        self._runtime.notes.record(training=facts)

    def described(self) -> Mapping[str, Sequence[float]]:
        """The parts of a step are metrics."""
        return {}

    def fresh(self, seed: int) -> "TrainingRequest":
        """Each step has fresh samples anyway."""
        return self
