"""Linear layers with e4m3 weights whose activations are rounded to e4m3."""

import torch
from torch.nn.functional import pad

from optigpu.ops.layouts import FP8_STEP
from optigpu.surgery.integer_layers import QuantizedLinear, float_bias

E4M3_LARGEST = 448.0
"""The largest e4m3 number (Micikevicius et al., 2022, table 1)."""


def quantize_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with one scale for each row (absmax / 448, round to nearest). rows: floating point [rows, inner].

    Returns float8_e4m3fn [rows, inner] and float32 [rows]; a row of zeros gets the scale 1, one with NaN or infinity a
    scale that is NaN or infinite.
    """
    wide = rows.float()
    scale = wide.abs().amax(dim=1) / E4M3_LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # The conversion gives NaN beyond the largest number, which the quotient's rounding may pass.
    return (wide / scale[:, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scale


class Fp8Linear(QuantizedLinear):
    """y = (q(x) @ q.T) * scale of x * scale + bias, in the dtype of x. Sums are float32."""

    product_dtypes = ("float8_e4m3fn",)
    q: torch.Tensor
    scale: torch.Tensor
    unit: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        q, scale = quantize_fp8(weight.detach())
        outputs, inner = q.shape
        # Padding knows no 8-bit floats; zero has the same bits as an integer.
        filled = pad(q.view(torch.uint8), (0, -inner % FP8_STEP, 0, -outputs % FP8_STEP))
        self.register_buffer("q", filled.contiguous().view(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", float_bias(bias))
        self.register_buffer("unit", torch.ones((), device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        q, row_scale = quantize_fp8(pad(rows, (0, self.q.shape[1] - rows.shape[1])))
        # Unit scales, and ours afterwards: so it runs wherever fp8 does, not only where scales of rows are known.
        sums = torch._scaled_mm(q, self.q.T, self.unit, self.unit, out_dtype=torch.float32)
        y = sums[:, : self.scale.shape[0]] * (row_scale[:, None] * self.scale)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.scale.shape[0])
