"""What llm_int8 and nf4 may compute: weights as their bytes say, and how far int8 activations move logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from optigpu.ops.layouts import NF4_BLOCK
from optigpu.surgery.places import linear_places
from tests.engine.rounding import DRAWS, SAFETY, logits_of

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""Dettmers et al., QLoRA, 2023, appendix E."""


def replaced_in(model: Any) -> list[Any]:
    """The linear layers of a model without its head."""
    layers = [place.layer for place in linear_places(model)]
    return [layer for layer in layers if layer is not model.get_output_embeddings()]


def twins(plain: Any, model: Any) -> list[tuple[Any, Any]]:
    """Each replaced layer, with the layer in its place in the quantized model."""
    head = plain.get_output_embeddings()
    places = [place for place in linear_places(plain) if place.layer is not head]
    return [(place.layer, model.get_submodule(place.path)) for place in places]


def dequantized(layer: Any) -> Any:
    """The weights of a layer of ours that is not packed, in float64, from its bytes: written apart from the library."""
    # The library multiplies level and statistic in float32 and rounds to the dtype that it computes in.
    statistics = layer.absmax
    if layer.nested:
        nested = layer.nested_absmax.repeat_interleave(256)[: statistics.numel()]
        statistics = layer.nested_levels[statistics.long()] * nested + layer.offset
    high, low = layer.packed.flatten() >> 4, layer.packed.flatten() & 15
    indices = torch.stack([high, low], dim=1).flatten()[: layer.shape[0] * layer.shape[1]]
    values = torch.tensor(NF4)[indices.long()] * statistics.repeat_interleave(NF4_BLOCK)[: indices.numel()]
    return values.to(layer.dtype).double().view(*layer.shape)


def rounded_to_int8(weight: Any) -> Any:
    """A float64 matrix as int8 with one scale a row, by way of float16, and back."""
    wide = weight.half().double()
    scale = wide.abs().amax(1, keepdim=True) / 127
    return (wide / scale).round() * scale


def activation_bound(reference: Any, tokens: Any, threshold: float) -> float:
    """As `rounding_bound`, for activations that are rounded to int8 before each linear layer but the head."""
    exact = logits_of(reference, tokens)
    torch.manual_seed(0)
    with _disturbed(replaced_in(reference), threshold):
        worst = max(float((logits_of(reference, tokens) - exact).abs().max()) for _ in range(DRAWS))
    return SAFETY * worst


@contextmanager
def _disturbed(layers: list[Any], threshold: float) -> Iterator[None]:
    def disturb(module: Any, inputs: tuple[Any, ...]) -> Any:
        x = inputs[0]
        outliers = (x.abs() >= threshold) if threshold > 0 else torch.zeros_like(x, dtype=torch.bool)
        step = x.masked_fill(outliers, 0).abs().amax(-1, keepdim=True) / 127
        return (x + (torch.rand_like(x) - 0.5) * step.expand_as(x).masked_fill(outliers, 0),)

    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
