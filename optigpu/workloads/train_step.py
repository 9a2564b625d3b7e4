"""train_step: steps of training a language model or an image classifier."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from optigpu.backends.training import (
    LabelledImages,
    Texts,
    TrainedStep,
    TrainingBatch,
    TrainingRuntime,
    UpdateRule,
)
from optigpu.documents.shapes import ImageFacts, ModelFacts
from optigpu.vocabulary import Task
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.decoding import exceeds_context
from optigpu.workloads.requests.images import wrong_size
from optigpu.workloads.requests.shapes import TrainingShape
from optigpu.workloads.requests.training import Draw, DrawnImages, DrawnTexts, TrainingRequest

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
    image_size: int | None = Field(
        None,
        ge=32,
        le=4096,
        description="Side of the images in pixels; by default the one that the model was trained with.",
    )
    optimizer: Optimizer = Field("adamw", description="The optimizer.")
    learning_rate: float = Field(1e-4, gt=0, le=1, description="Its learning rate, the same for all steps.")

    @property
    def update_rule(self) -> UpdateRule:
        """Its optimizer with its learning rate."""
        return UpdateRule(self.optimizer, self.learning_rate)

    def check(self, model: ModelFacts | ImageFacts) -> str | None:
        """Rows fit the context; a model with an embedding of each place takes images of one size."""
        if isinstance(model, ModelFacts):
            return exceeds_context(model, self.sequence_tokens, "sequence_tokens")
        return wrong_size(model, self.image_size)

    def prepare(self, runtime: TrainingRuntime) -> TrainingRequest:
        """Draws the samples from the runtime's seed."""
        return TrainingRequest(runtime, self.draws(runtime.facts, runtime.seed), self._metrics)

    def draws(self, model: ModelFacts | ImageFacts, seed: int) -> Draw:
        """What makes the samples of one step after the other, the same for the same seed."""
        if isinstance(model, ImageFacts):
            images = DrawnImages(model, self.image_size or model.image_size, seed)
            return lambda: images.batch(self.batch_size)
        texts = DrawnTexts(model, seed)
        return lambda: texts.batch(self.batch_size, self.sequence_tokens, self._shortest)

    def trained_tokens(self, model: ModelFacts | ImageFacts) -> float | None:
        """Lengths are drawn evenly."""
        if isinstance(model, ImageFacts):
            return None
        return self.batch_size * (self._shortest + self.sequence_tokens) / 2

    def trained_images(self, model: ModelFacts | ImageFacts) -> int | None:
        """All samples of a classifier."""
        return self.batch_size if isinstance(model, ImageFacts) else None

    @property
    def work_shape(self) -> TrainingShape:
        """One step, whose rate the primary metric gives in samples."""
        return TrainingShape(units=self.batch_size)

    @property
    def _shortest(self) -> int:
        return self.shortest_tokens or self.sequence_tokens

    def _metrics(self, batch: TrainingBatch, step: TrainedStep) -> Mapping[str, float]:
        """Rates and the parts of a step."""
        parts = {
            "samples_per_s": self.batch_size / step.step_s,
            "step_s": step.step_s,
            "data_s": step.data_s,
            "forward_s": step.forward_s,
            "backward_s": step.backward_s,
            "optimizer_s": step.optimizer_s,
        }
        if isinstance(batch, LabelledImages):
            return parts | {"images_per_s": len(batch.labels) / step.step_s}
        return parts | _token_rates(batch, step)


def _token_rates(batch: Texts, step: TrainedStep) -> dict[str, float]:
    tokens = sum(len(document) for document in batch.documents)
    return {
        "trained_tokens_per_s": tokens / step.step_s,
        "padded_tokens_per_s": step.computed_tokens / step.step_s,
    }
