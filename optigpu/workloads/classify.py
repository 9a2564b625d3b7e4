"""classify: batches of images through a classifier."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from optigpu.backends.runtime import ImageRuntime
from optigpu.documents.facts import NetworkFacts
from optigpu.documents.shapes import ImageFacts
from optigpu.vocabulary import Task
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.passes import PassRequest
from optigpu.workloads.requests.shapes import ImageShape


class Classify(Workload):
    """One forward pass over a batch of square images of random normal pixels, up to the most likely class of each.

    The images are on the device in the weights' dtype before the pass; reading, scaling and copying them is not timed.
    On CUDA PyTorch's default lets convolutions of float32 weights round to TF32, and that is the baseline; the result's
    facts say so (`cudnn_tf32`).
    `image_size` is their side in pixels, null for the one that the model was trained with.
    """

    summary: ClassVar[str] = "image classification, up to the most likely class of each image"
    primary: ClassVar[str] = "images_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("images_per_s", "latency_s", "requests_per_s")
    task: ClassVar[Task] = Task.IMAGES
    example_model: ClassVar[str] = "preset:resnet-50"

    kind: Literal["classify"] = "classify"
    batch_size: int = Field(1, ge=1, le=1024, description="How many images at once.")
    image_size: int | None = Field(
        None,
        ge=32,
        le=4096,
        description="Side of the images in pixels; by default the one that the model was trained with.",
    )

    @property
    def classified_images(self) -> int:
        """The batch."""
        return self.batch_size

    @property
    def work_shape(self) -> ImageShape:
        """A pass is over the batch."""
        return ImageShape(self.batch_size, units=self.batch_size)

    def check(self, model: ImageFacts) -> str | None:
        """A model with an embedding of each place takes images of one size."""
        if not model.fixed_size or self.image_size in (None, model.image_size):
            return None
        return (
            f"image_size is {self.image_size} and this {model.family} takes images of {model.image_size} pixels alone; "
            "leave image_size out."
        )

    def prepare(self, runtime: ImageRuntime) -> PassRequest:
        """Draws the images from the runtime's seed."""
        facts, source = runtime.facts, np.random.default_rng(runtime.seed)
        side = self.image_size or facts.image_size
        network = NetworkFacts(
            family=facts.family,
            alpha=facts.alpha,
            input=(side, side, facts.channels),
            classes=facts.classes,
        )
        runtime.notes.record(image_shape=[facts.channels, side, side], network=network)
        shape = (self.batch_size, facts.channels, side, side)
        return PassRequest(
            runtime,
            lambda: source.standard_normal(shape, np.float32),
            (self.batch_size, facts.classes),
            self._metrics,
        )

    def _metrics(self, seconds: float) -> Mapping[str, float]:
        """An image is a request, as a prompt of a batch is one."""
        rate = self.batch_size / seconds
        return {"images_per_s": rate, "latency_s": seconds, "requests_per_s": rate}
