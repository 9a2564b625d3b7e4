"""Linear layers with int8 weights and floating-point activations: the arithmetic of `int8_weight_only`.

    q, scale = quantize_rows(weight)             # once
    packed = pack(q)                             # once
    y = int8_linear(x, packed, scale, bias)      # y = (x @ q.T) * scale + bias

On a CPU with a compiler this is our C++ operator (int8_linear.cpp), on CUDA with Triton our kernels (triton_int8.py),
elsewhere plain torch. Generating one token at a time is bound by the weights' bytes, a quarter of those of fp32.
"""

import importlib
import importlib.util
import math
import sys
from typing import Literal

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, sources
from optigpu.ops.layouts import INT8_TILE
from optigpu.ops.operands import INT8_LARGEST, check_activations, check_bias, linear_fake, named

Int8Backend = Literal[
    "native-avx512", "native-avx2", "native-portable", "triton", "torch-int8pack", "torch-dequantize"
]

TILE = INT8_TILE
INSTRUCTION_SETS: dict[Int8Backend, int] = {"native-portable": 1, "native-avx2": 2, "native-avx512": 3}
"""The operator's numbers; the enumeration InstructionSet in int8_linear.cpp."""
INT8PACK_ROWS = 16
"""Above this number of rows, torch's int8 operator is slower than widening the weights for a plain matrix product."""
INT8PACK_STEP = 64
"""torch's int8 operator reads past the end of rows that are no multiple of its vectors (seen with torch 2.13)."""
OLDEST_CAPABILITY = (7, 5)
"""The first GPUs that Triton compiles for."""
ROWS_WITHOUT_MATRIX_UNITS = 16
"""The most rows for our kernels on GPUs whose matrix units Triton does not use: torch's product does, for more."""
SCALE_UNIT = 2**-7
"""Exact in every type, and keeps the sums of float16 activations with weights up to 127 in float16's range."""
_SOURCES = sources(__file__, "int8_linear.cpp", "int8_linear_kernel.h", "../bfloat16.h")
_NATIVE = NativeOperators(
    _SOURCES, "optigpu_best_instruction_set", {"int8_linear": linear_fake}, INSTRUCTION_SETS
)
native_reason = _NATIVE.reason
_TRITON_ROWS: dict[str, int] = {}
"""The most rows for the Triton kernels, by device, filled when weights are packed: traced code cannot load Triton."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization with one scale per output (absmax / 127, round to nearest).

    weight: [outputs, inner], floating point. Returns int8 [outputs, inner] and float32 [outputs]; the weight is about
    `q * scale[:, None]`, wrong by at most half a scale. A row of zeros, or of numbers so small that its scale
    underflows, gets the scale 1. Raises ValueError when the weight is not a finite floating-point matrix.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize_rows needs a floating-point matrix, not {named(weight)}.")
    wide = weight.detach().float()
    largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("quantize_rows needs finite weights: this matrix holds NaN or infinity.")
    scale = largest / INT8_LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # A denormal scale can round the quotient past 127.
    q = (wide / scale[:, None]).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    return q, scale


def int8_linear_backend(device: torch.device | str) -> Int8Backend:
    """The backend of `pack` and `int8_linear` on `device` in this process. Builds the C++ operator if it can."""
    kind = torch.device(device).type
    if kind != "cpu":
        return "triton" if _triton_rows(kind) else "torch-dequantize"
    return "torch-int8pack" if native_reason() is not None else _NATIVE.best


def pack(q: torch.Tensor) -> torch.Tensor:
    """Lays out int8 weights [outputs, inner] for `int8_linear` on their device.

    For the C++ operator: int8 [tiles, inner, TILE], the last tile filled up with zeros. Elsewhere: q itself,
    contiguous. Raises ValueError when q is not an int8 matrix.
    """
    if q.dim() != 2 or q.dtype != torch.int8:
        raise ValueError(f"pack needs an int8 matrix, not {named(q)}.")
    if not int8_linear_backend(q.device).startswith("native"):
        return q.contiguous()
    outputs, inner = q.shape
    filled = torch.nn.functional.pad(q, (0, 0, 0, -outputs % TILE))
    return filled.view(-1, TILE, inner).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """int8 weights [outputs, inner] from what `pack` returned."""
    if packed.dim() == 2:
        return packed
    return packed.transpose(1, 2).flatten(0, 1)[:outputs]


def int8_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """y = (x @ q.T) * scale + bias, with activations that are not quantized. Has no gradient.

    x: float32, bfloat16 or float16 [..., inner]; packed: what `pack` returned; scale and bias: float32 [outputs].
    Returns [..., outputs] in x's type. `instruction_set`: a path of the C++ operator, from INSTRUCTION_SETS. Traces
    into one graph under torch.compile(fullgraph=True). On CUDA with Triton all sums are float32. The plain torch path
    sums in x's type there, and on a CPU rounds x to bfloat16 for few rows. Raises ValueError for shapes and types that
    do not fit.
    """
    _check(x, packed, scale, bias)
    if packed.dim() == 2:
        if x.device.type != "cpu" and math.prod(x.shape[:-1]) <= _triton_rows(x.device.type):
            from optigpu.ops.linear.triton_int8 import triton_int8_linear

            y: torch.Tensor = triton_int8_linear(x, packed, scale, bias)
            return y
        return _torch_linear(x, packed, scale, bias)
    known = x.float() if x.dtype == torch.float16 else x  # the C++ operator knows the other two types
    y = torch.ops.optigpu.int8_linear(known, packed, scale, bias, instruction_set)
    return y.to(x.dtype)


def _torch_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same in plain torch. q: int8 [outputs, inner]. Inductor can fuse the widening into the product."""
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu" and rows.shape[0] <= INT8PACK_ROWS and rows.shape[1] % INT8PACK_STEP == 0:
        # It is fast with bfloat16 activations only. Its scales would be bfloat16 too: ours are applied after it.
        unit = torch.full_like(scale, SCALE_UNIT, dtype=torch.bfloat16)
        sums = torch._weight_int8pack_mm(rows.to(torch.bfloat16), q, unit)
    else:
        sums = rows @ (q.to(x.dtype) * SCALE_UNIT).T
    y = sums * (scale / SCALE_UNIT)
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def _triton_rows(kind: str) -> int:
    """The most rows of a product that goes to the Triton kernels on a kind of device; 0 where there are none."""
    if kind not in _TRITON_ROWS:
        _TRITON_ROWS[kind] = 0
        has_triton = kind == "cuda" and importlib.util.find_spec("triton") is not None
        if has_triton and (capability := torch.cuda.get_device_capability()) >= OLDEST_CAPABILITY:
            launch = importlib.import_module("optigpu.ops.launch")
            importlib.import_module("optigpu.ops.linear.triton_int8")
            has_units = capability >= launch.MATRIX_UNITS
            _TRITON_ROWS[kind] = sys.maxsize if has_units else ROWS_WITHOUT_MATRIX_UNITS
    return _TRITON_ROWS[kind]


def _check(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_activations(x, "int8_linear")
    if packed.dtype != torch.int8 or packed.dim() not in (2, 3):
        raise ValueError(f"int8_linear needs the weights as pack() returns them, not {named(packed)}.")
    if packed.shape[1] != x.shape[-1]:
        raise ValueError(f"The weights take {packed.shape[1]} inputs; x has {x.shape[-1]}.")
    unit = 1 if packed.dim() == 2 else TILE
    if scale.dtype != torch.float32 or scale.dim() != 1 or -(-scale.shape[0] // unit) != packed.shape[0]:
        raise ValueError(f"int8_linear needs one float32 scale per output, not {named(scale)}.")
    check_bias(bias, scale.shape[0], "int8_linear")
