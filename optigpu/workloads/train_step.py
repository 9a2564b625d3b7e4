"""train_step: steps of training a language model or an image classifier."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from optigpu.backends.training import (
    LabelledImages,
    Texts,
    TrainedStep,
    TrainingBatch,
    TrainingRuntime,
    UpdateRule,
)
from optigpu.documents.facts import ImageFacts, ModelFacts, TrainingFacts
from optigpu.vocabulary import Task, UnsupportedError
from optigpu.workloads.base import Check, ImageSize, Request, TrainingShape, Workload, wrong_size
from optigpu.workloads.requests import exceeds_context

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


class TrainingRequest(Request):
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
        batch = self._draw()
        return self._metrics(batch, self._runtime.step(batch))

    def check(self) -> Check:
        batch = self._draw()
        step = self._runtime.step(batch)
        if not np.isfinite(step.loss):
            return Check(step.step_s, f"The loss of a step is {step.loss}.")
        norm = self._runtime.gradient_norm(batch)
        if not (np.isfinite(norm) and norm > 0):
            return Check(step.step_s, f"The norm of the gradient is {norm}; nothing can be learned from it.")
        return Check(step.step_s, details={"gradient_norm": norm})

    def observe(self) -> None:
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

    def fresh(self, seed: int) -> "TrainingRequest":
        return self


Optimizer = Literal["adamw", "sgd"]


class TrainStep(Workload):
    """One step of training with seeded samples: arrange them, losses, gradients, new weights.

    A language model learns documents in which each token has four possible successors, a classifier images with a
    pattern for each class. Dropout is off, so that two stacks can be compared by their losses.
    """

    summary: ClassVar[str] = "one training step: data, forward, backward and optimizer"
    primary: ClassVar[str] = "samples_per_s"
    metrics: ClassVar[tuple[str, ...]] = (
        "samples_per_s",
        "step_s",
        "data_s",
        "forward_s",
        "backward_s",
        "optimizer_s",
    )
    for_some: ClassVar[Mapping[str, str]] = {
        "trained_tokens_per_s": "an image classifier has no tokens",
        "padded_tokens_per_s": "an image classifier has no tokens",
        "images_per_s": "a language model learns no images",
    }
    task: ClassVar[Task] = Task.TRAINING
    example_model: ClassVar[str] = "preset:gpt2"

    kind: Literal["train_step"] = "train_step"
    batch_size: int = Field(4, ge=1, le=4096, description="How many documents or images a step learns from.")
    sequence_tokens: int = Field(
        128, ge=2, le=131072, description="Tokens of a row, and of the longest document; of a language model."
    )
    shortest_tokens: int | None = Field(
        None,
        ge=2,
        le=131072,
        description="Tokens of the shortest document: lengths are drawn evenly; null makes all as long as a row.",
    )
    image_size: ImageSize = None
    optimizer: Optimizer = Field("adamw", description="The optimizer.")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Its learning rate, the same for all steps.")

    @property
    def update_rule(self) -> UpdateRule:
        return UpdateRule(self.optimizer, self.learning_rate)

    def check(self, model: ModelFacts | ImageFacts) -> str | None:
        if isinstance(model, ModelFacts):
            return exceeds_context(model, self.sequence_tokens, "sequence_tokens")
        return wrong_size(model, self.image_size)

    def prepare(self, runtime: TrainingRuntime) -> TrainingRequest:
        return TrainingRequest(runtime, self.draws(runtime.facts, runtime.seed), self._metrics)

    def draws(self, model: ModelFacts | ImageFacts, seed: int) -> Draw:
        if isinstance(model, ImageFacts):
            images = DrawnImages(model, self.image_size or model.image_size, seed)
            return lambda: images.batch(self.batch_size)
        texts = DrawnTexts(model, seed)
        return lambda: texts.batch(self.batch_size, self.sequence_tokens, self._shortest)

    def trained_tokens(self, model: ModelFacts | ImageFacts) -> float | None:
        if isinstance(model, ImageFacts):
            return None
        return self.batch_size * (self._shortest + self.sequence_tokens) / 2

    def trained_images(self, model: ModelFacts | ImageFacts) -> int | None:
        return self.batch_size if isinstance(model, ImageFacts) else None

    @property
    def work_shape(self) -> TrainingShape:
        return TrainingShape(units=self.batch_size)

    @property
    def _shortest(self) -> int:
        return self.shortest_tokens or self.sequence_tokens

    def _metrics(self, batch: TrainingBatch, step: TrainedStep) -> Mapping[str, float]:
        parts = {"samples_per_s": self.batch_size / step.step_s}
        parts |= {name: getattr(step, name) for name in self.metrics[1:]}
        if isinstance(batch, LabelledImages):
            return parts | {"images_per_s": len(batch.labels) / step.step_s}
        tokens = sum(len(document) for document in batch.documents)
        return parts | {
            "trained_tokens_per_s": tokens / step.step_s,
            "padded_tokens_per_s": step.computed_tokens / step.step_s,
        }
