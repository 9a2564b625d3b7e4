"""How long products with 4-bit weights take: by one operator, by widening and multiplying, and without quantizing."""

from dataclasses import dataclass

import torch

from optigpu.backends.torch.clock import calls_s
from optigpu.backends.torch.device import TorchDevice
from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import int4_linear, int4_linear_backend, int4_rows, pack_int4
from optigpu.vocabulary import DeviceKind

TURNS, CALLS = 7, 20
"""The three take turns; each figure is the median turn's, of so many calls."""


@dataclass(frozen=True)
class ProductSeconds:
    """Seconds of one product: `fused`, `separate` (dequantized into memory, then multiplied), `plain` in bfloat16."""

    fused: float
    separate: float
    plain: float


def product_seconds(
    device: DeviceKind, rows: int, inputs: int, outputs: int, group_size: int
) -> ProductSeconds:
    """Measures a product of x [rows, inputs] with random weights [outputs, inputs] in bfloat16 on a device."""
    place = TorchDevice(device, seed=0)
    generator = torch.Generator().manual_seed(place.seed)
    drawn = [torch.randn(shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs))]
    x, weight = (tensor.to(place.name, torch.bfloat16) for tensor in drawn)
    numbers = quantize_groups(weight, Int4Scheme(group_size, solver="min_max"))
    fused = pack_int4(numbers, int4_linear_backend(x.device, x.dtype))
    readable, every = pack_int4(numbers, "torch-dequantize"), torch.arange(outputs, device=x.device)
    works = (
        lambda: int4_linear(x, fused),
        lambda: torch.nn.functional.linear(x, int4_rows(readable, every).to(x.dtype)),
        lambda: torch.nn.functional.linear(x, weight),
    )
    turns = [[calls_s(work, CALLS, place.clock) / CALLS for work in works] for _ in range(TURNS + 1)]
    first_left_out = torch.tensor(turns[1:], dtype=torch.float64)
    return ProductSeconds(*first_left_out.median(dim=0).values.tolist())
