"""int8_weight_only: weights as int8 with one scale for each output channel, activations as they are."""

import functools
from typing import Any, ClassVar, Literal

from optigpu.techniques.base import Notes, Phase, Technique
from optigpu.vocabulary import Layer, UnsupportedError


class Int8WeightOnly(Technique):
    """Replaces every linear layer, GPT-2's Conv1D and the tied head by int8 ones.

    A tied head becomes an int8 copy while the embedding keeps its dtype: a lookup reads one row for each token, so
    its bytes cost no time, and int8 rows would cost precision. `weight_bytes` counts both.
    """

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    summary: ClassVar[str] = (
        "int8 weights with one scale for each output channel; activations stay as they are"
    )
    citation: ClassVar[str] = "Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339 (vector-wise scales)"
    expected: ClassVar[str] = "a quarter of the fp32 bytes; up to 4x where decoding is bound by memory"

    name: Literal["int8_weight_only"] = "int8_weight_only"

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces the linear layers in place.

        Raises UnsupportedError when the model has none.
        """
        from optigpu.ops import int8_linear_backend

        layers = _linear_layers(model)
        if not layers:
            raise UnsupportedError(
                "int8_weight_only found no linear layer in this model; leave it out of the stack."
            )
        for parent, name in layers:
            setattr(parent, name, _as_int8(getattr(parent, name)))
        notes.record(int8_layers=len(layers), int8_backend=int8_linear_backend(model.device))


def _linear_layers(model: Any) -> list[tuple[Any, str]]:
    """Every linear layer as its parent and its name there."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (Linear, Conv1D))
    ]


def _as_int8(layer: Any) -> Any:
    """The int8 twin of a Linear (weight [outputs, inner]) or a Conv1D (weight [inner, outputs])."""
    from transformers.pytorch_utils import Conv1D

    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    return _int8_linear_class()(weight, layer.bias)


@functools.cache
def _int8_linear_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch

    from optigpu.ops import int8_linear, pack, quantize_rows

    class Int8Linear(torch.nn.Module):
        """y = (x @ q.T) * scale + bias, in the dtype of x."""

        packed: torch.Tensor
        scale: torch.Tensor
        bias: torch.Tensor | None

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__()
            q, scale = quantize_rows(weight)
            self.register_buffer("packed", pack(q))
            self.register_buffer("scale", scale)
            self.register_buffer("bias", None if bias is None else bias.detach().float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return int8_linear(x, self.packed, self.scale, self.bias)

    return Int8Linear
