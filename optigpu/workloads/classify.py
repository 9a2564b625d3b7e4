"""classify: batches of images through a classifier."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from optigpu.backends.runtime import ImageRuntime, Images
from optigpu.documents.facts import ImageFacts, NetworkFacts
from optigpu.quality.pictures import check_folder, read_pictures
from optigpu.vocabulary import Task
from optigpu.workloads.base import ImageShape, ImageSize, Workload, wrong_size
from optigpu.workloads.requests import PassRequest


class Classify(Workload):
    """One forward pass over a batch of square images of random normal pixels, up to the most likely class of each.

    The images are on the device in the weights' dtype before the pass; reading, scaling and copying them is not timed.
    On CUDA PyTorch's default lets convolutions of float32 weights round to TF32, and that is the baseline; the result's
    facts say so (`cudnn_tf32`).
    `image_size` is their side in pixels, null for the one that the model was trained with.

    With `images` they are those of a folder instead, prepared as the model's own processor does, and the meter quality
    gives the share that is classified correctly. The folder holds a folder for each class, or a labels.csv with the
    columns file and label.
    """

    summary: ClassVar[str] = "image classification, up to the most likely class of each image"
    primary: ClassVar[str] = "images_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("images_per_s", "latency_s", "requests_per_s")
    whole: ClassVar[str | None] = "latency_s"
    task: ClassVar[Task] = Task.IMAGES
    example_model: ClassVar[str] = "preset:resnet-50"
    later: ClassVar[tuple[str, ...]] = ("images",)

    kind: Literal["classify"] = "classify"
    batch_size: int = Field(1, ge=1, le=1024, description="How many images at once.")
    image_size: ImageSize = None
    images: str | None = Field(
        None,
        max_length=200,
        description="A folder of labelled images under OPTIGPU_DATASETS_DIR, instead of random ones.",
    )

    @field_validator("images")
    @classmethod
    def _inside(cls, images: str | None) -> str | None:
        return None if images is None else check_folder(images)

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.images is not None and self.image_size is not None:
            raise ValueError(
                "image_size follows from the model's processor; leave it out, or leave images out"
            )
        return self

    @property
    def has_labels(self) -> bool:
        return self.images is not None

    @property
    def classified_images(self) -> int:
        return self.batch_size

    @property
    def image_side(self) -> int | None:
        return self.image_size

    @property
    def work_shape(self) -> ImageShape:
        return ImageShape(self.batch_size, units=self.batch_size)

    def check(self, model: ImageFacts) -> str | None:
        return wrong_size(model, self.image_size)

    def prepare(self, runtime: ImageRuntime) -> PassRequest:
        """Draws the images from the runtime's seed, or reads those of the folder, batch by batch. Raises
        UnsupportedError for a folder that cannot be read, and an engine that reads none."""
        facts = runtime.facts
        side = self.image_size or facts.image_size
        shape: tuple[int, ...] = (self.batch_size, facts.channels, side, side)

        def draw(source: np.random.Generator) -> Images:
            return source.standard_normal(shape, np.float32)

        inputs: Images | None = None
        if self.images is not None:
            pictures = read_pictures(runtime, self.images)
            inputs = next(pictures.batches(self.batch_size))
            shape = inputs.shape
            runtime.notes.record(pictures=pictures.facts)
        seen = (*shape[2:], facts.channels)
        network = NetworkFacts(family=facts.family, alpha=facts.alpha, input=seen, classes=facts.classes)
        runtime.notes.record(image_shape=list(shape[1:]), network=network)

        def metrics(seconds: float) -> Mapping[str, float]:
            rate = self.batch_size / seconds  # an image is a request, as a prompt of a batch is one
            return {"images_per_s": rate, "latency_s": seconds, "requests_per_s": rate}

        return PassRequest(runtime, draw, (self.batch_size, facts.classes), metrics, inputs=inputs)
