"""fp8: weights and activations of linear layers as 8-bit floats (e4m3)."""

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.hardware.capability import needs_capability
from optigpu.models.facts import ModelFacts
from optigpu.surgery.places import checked_places, exchange, weight_of
from optigpu.techniques.base import ON_MODELS, Choice, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    import torch

NEEDED_CAPABILITY = (8, 9)
"""Ada and Hopper."""
LARGEST = 448.0
"""The largest e4m3 number (Micikevicius et al., 2022, table 1)."""
STEP = 16
"""torch._scaled_mm takes inputs and outputs that are multiples of this on CUDA."""


class Fp8(Technique):
    """Replaces every linear layer by one with e4m3 weights, one scale per output, that rounds its activations to e4m3.

    Activations get one scale for each token as they come. A tied embedding keeps its dtype, as in int8_weight_only.
    """

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = (
        "e4m3 weights and activations with scales for each output and token, on fp8 tensor cores"
    )
    citation: ClassVar[str] = "Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433"
    expected: ClassVar[str] = (
        "a quarter of the fp32 bytes; twice the matrix rate of bf16; decoding gains less, since launches bound small "
        "products"
    )
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CUDA,)
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS,)

    name: Literal["fp8"] = "fp8"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Ada, Hopper and later have it."""
        return needs_capability(environment, NEEDED_CAPABILITY, "fp8 matrix products")

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """int8_weight_only needs no rounded activations for the same bytes."""
        return False

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces the linear layers in place.

        Raises UnsupportedError when the model has none, is quantized already, or has weights that are no numbers.
        """
        places = checked_places(model, self.name)
        exchange(places, _as_fp8)
        notes.record(fp8_layers=len(places), fp8_backend="torch._scaled_mm")


def quantize_fp8(rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """e4m3 with one scale for each row (absmax / 448, round to nearest). rows: floating point [rows, inner].

    Returns float8_e4m3fn [rows, inner] and float32 [rows]; a row of zeros gets the scale 1, one with NaN or infinity a
    scale that is none.
    """
    import torch

    wide = rows.float()
    scale = wide.abs().amax(dim=1) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # The conversion gives NaN beyond the largest number, which the quotient's rounding may pass.
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _as_fp8(layer: Any) -> Any:
    """The fp8 twin of a Linear or a Conv1D."""
    return fp8_linear_class()(weight_of(layer), layer.bias)


@functools.cache
def fp8_linear_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch
    from torch.nn.functional import pad

    class Fp8Linear(torch.nn.Module):
        """y = (q(x) @ q.T) * scale of x * scale + bias, in the dtype of x. Sums are float32."""

        holds_quantized_weights = True
        q: torch.Tensor
        scale: torch.Tensor
        bias: torch.Tensor | None
        unit: torch.Tensor

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__()
            q, scale = quantize_fp8(weight.detach())
            outputs, inner = q.shape
            # Padding knows no 8-bit floats; zero has the same bits as an integer.
            filled = pad(q.view(torch.uint8), (0, -inner % STEP, 0, -outputs % STEP))
            self.register_buffer("q", filled.contiguous().view(torch.float8_e4m3fn))
            self.register_buffer("scale", scale)
            self.register_buffer("bias", None if bias is None else bias.detach().float())
            self.register_buffer("unit", torch.ones((), device=weight.device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            q, row_scale = quantize_fp8(pad(rows, (0, self.q.shape[1] - rows.shape[1])))
            # Unit scales, and ours afterwards: so it runs wherever fp8 does, not only where scales of rows are known.
            sums = torch._scaled_mm(q, self.q.T, self.unit, self.unit, out_dtype=torch.float32)
            y = sums[:, : self.scale.shape[0]] * (row_scale[:, None] * self.scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], self.scale.shape[0])

    return Fp8Linear
