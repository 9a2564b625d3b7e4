"""What a step reads of a model with its stack applied, as far as a roofline needs it. Torch-free."""

from dataclasses import dataclass

from optigpu.models.facts import ImageFacts, ModelFacts


@dataclass(frozen=True)
class Footprint:
    """A model with its stack applied, as far as a roofline needs it.

    `streamed_bytes` are the weights that every step reads wholly, in the width that they are stored in. `row_bytes` is
    what one token reads of the tables that are only looked up: an embedding whose weights no other layer shares.
    """

    facts: ModelFacts
    streamed_bytes: int
    row_bytes: int


@dataclass(frozen=True)
class ImageFootprint:
    """An image classifier with its stack applied, as far as a roofline needs it.

    `streamed_bytes` are the weights, in the width that they are stored in. `flops` are the operations of matrix
    products and convolutions for one image of `pixels` numbers: the architecture's, whatever the stack computes with.
    """

    facts: ImageFacts
    streamed_bytes: int
    flops: int
    pixels: int
