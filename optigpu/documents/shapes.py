"""The shapes of models as counts, and what one step reads of a loaded model: stored with each result."""

from dataclasses import dataclass

_MOST_TOKENS = 2**20


@dataclass(frozen=True)
class ModelFacts:
    """A decoder's shapes, as counts; `context` is in tokens, None for any number. Without attention there are no heads,
    and a head size of 0. `family` is transformers' model_type ("gpt2"). `inner_size` is the width of the MLP, whose
    matrices are two, or three where it is gated; both are None for a family whose blocks are not known.
    `embedding_size` is the width of a row of the embedding and of the head, which some OPT models project to
    `hidden_size`."""

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int | None
    tied_head: bool
    head_size: int
    inner_size: int | None
    gated_mlp: bool | None
    embedding_size: int

    @property
    def longest(self) -> int:
        """The most tokens of a sequence: its context, and 2 ** 20 for a model that takes any number of them."""
        return _MOST_TOKENS if self.context is None else self.context


@dataclass(frozen=True)
class ImageFacts:
    """An image classifier's shapes. `image_size` is the side in pixels that it was trained with; `fixed_size`: it takes
    no other. `alpha` is its width multiplier as text, None for the full width."""

    family: str
    channels: int
    image_size: int
    classes: int
    fixed_size: bool
    alpha: str | None = None


@dataclass(frozen=True)
class Footprint:
    """A decoder with its stack applied, for the roofline. `streamed_bytes` are the weights that every step reads
    wholly, as they are stored. `row_bytes` is what one token reads of the tables that are only looked up.
    `product_dtypes` are what layers multiply that compute in another dtype than the model's."""

    facts: ModelFacts
    streamed_bytes: int
    row_bytes: int
    product_dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImageFootprint:
    """An image classifier with its stack applied, for the roofline. `streamed_bytes` are the weights, as they are
    stored. `flops` are the architecture's operations of products and convolutions for one image of `pixels` numbers.
    `product_dtypes` are what layers multiply that compute in another dtype than the model's."""

    facts: ImageFacts
    streamed_bytes: int
    flops: int
    pixels: int
    product_dtypes: tuple[str, ...] = ()
