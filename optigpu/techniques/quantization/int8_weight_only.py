"""int8_weight_only: weights as int8 with one scale for each output channel, activations as they are."""

import functools
from typing import Any, ClassVar, Literal

from optigpu.techniques.base import Choice, Notes, Phase, Technique
from optigpu.techniques.layers import checked_places, exchange, weight_of
from optigpu.vocabulary import Layer


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
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS,)
    expected: ClassVar[str] = "a quarter of the fp32 bytes; up to 4x where decoding is bound by memory"

    name: Literal["int8_weight_only"] = "int8_weight_only"

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces the linear layers in place.

        Raises UnsupportedError when the model has none, is quantized already, or has weights that are no numbers.
        """
        from optigpu.ops import int8_linear_backend

        places = checked_places(model, self.name)
        exchange(places, _as_int8)
        notes.record(int8_layers=len(places), int8_backend=int8_linear_backend(model.device))


def _as_int8(layer: Any) -> Any:
    """The int8 twin of a Linear or a Conv1D."""
    return _int8_linear_class()(weight_of(layer), layer.bias)


@functools.cache
def _int8_linear_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch

    from optigpu.ops import int8_linear, pack, quantize_rows

    class Int8Linear(torch.nn.Module):
        """y = (x @ q.T) * scale + bias, in the dtype of x."""

        holds_quantized_weights = True
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
