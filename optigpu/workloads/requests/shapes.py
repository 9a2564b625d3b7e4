"""What a workload does in one step, as data: a roofline computes bytes and operations from it and the model's shapes.

`units` is what the workload's primary metric counts of one step: its tokens, its images, its 10^12 operations; 1 where
the metric is the step's own time.
"""

from dataclasses import dataclass

from optigpu.documents.shapes import ImageFacts


@dataclass(frozen=True)
class DecodeShape:
    """Decode steps after a prompt, one token for each sequence of a batch; a step is the mean over a request's."""

    prompt_tokens: int
    new_tokens: int
    batch_size: int
    units: float


@dataclass(frozen=True)
class PrefillShape:
    """The pass over a batch of prompts, up to the first token."""

    prompt_tokens: int
    batch_size: int
    units: float


@dataclass(frozen=True)
class ImageShape:
    """The pass over a batch of images."""

    batch_size: int
    units: float


@dataclass(frozen=True)
class OperatorShape:
    """One call of an operator without a model: the least bytes that it reads and writes, and its operations.

    Operations of attention are apart from those of other matrix products.
    """

    name: str
    dtype: str
    bytes: float
    units: float
    matmul_flops: float = 0.0
    attention_flops: float = 0.0


@dataclass(frozen=True)
class TrainingShape:
    """A step of training; its operations are counted when it runs."""

    units: float


WorkShape = DecodeShape | PrefillShape | ImageShape | OperatorShape | TrainingShape


def wrong_size(model: ImageFacts, image_size: int | None) -> str | None:
    """Why a classifier takes no images of that side, or None; None asks for the side that it was trained with."""
    if not model.fixed_size or image_size in (None, model.image_size):
        return None
    return (
        f"image_size is {image_size} and this {model.family} takes images of {model.image_size} pixels alone; leave "
        "image_size out."
    )
