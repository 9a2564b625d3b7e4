"""Linear layers with int8 weights and activations that are quantized to int8 at run time, each row by itself.

    q, scale = quantize_rows(weight)               # once
    packed = pack_dynamic(q)                       # once
    y = int8_dynamic(x, packed, scale, bias)       # y = (round(x / s) @ q.T) * s * scale + bias, s = max |x| / 127

The sums are 32-bit integers and exact, so a result differs from the formula by its last roundings alone. On a CPU with
a compiler this is our C++ operator (int8_dynamic.cpp), on CUDA torch._int_mm, and elsewhere a product of the same
integers in float32, which rounds its sums. int8 activations buy arithmetic, which counts for prompts and batches.
"""

from typing import Literal

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, sources
from optigpu.ops.layouts import DYNAMIC_CUDA_STEP, DYNAMIC_GROUP, DYNAMIC_TILE
from optigpu.ops.operands import INT8_LARGEST, check_activations, check_bias, linear_fake, named

DynamicBackend = Literal["native-avx512vnni", "native-avx2", "native-portable", "torch-int_mm", "torch-widen"]

TILE, GROUP, CUDA_STEP = DYNAMIC_TILE, DYNAMIC_GROUP, DYNAMIC_CUDA_STEP
MOST_INNER = 65536
"""More inputs could overflow a 32-bit sum; kMostInner in int8_dynamic.cpp."""
INSTRUCTION_SETS: dict[DynamicBackend, int] = {"native-portable": 1, "native-avx2": 2, "native-avx512vnni": 3}
"""The operator's numbers; the enumeration InstructionSet in int8_dynamic.cpp."""
CUDA_ROWS = 32
"""It takes no fewer than 17 rows there; fewer are filled up to this."""
_SOURCES = sources(__file__, "int8_dynamic.cpp", "int8_dynamic_kernel.h", "../bfloat16.h")
_NATIVE = NativeOperators(
    _SOURCES, "optigpu_best_dynamic_instruction_set", {"int8_dynamic": linear_fake}, INSTRUCTION_SETS
)
dynamic_native_reason = _NATIVE.reason


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization with one scale per row, as the operator does it (round to nearest, ties to even).

    x: floating point [rows, inner]. Returns int8 [rows, inner] and float32 [rows, 1]. A row of zeros gets the scale 1;
    one with NaN or infinity gets a scale that is NaN or infinite.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    scale = largest / INT8_LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = (wide / scale).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    return q, scale


def int8_dynamic_backend(device: torch.device | str) -> DynamicBackend:
    """The backend of `pack_dynamic` and `int8_dynamic` on `device` in this process. Builds the operator if it can."""
    if torch.device(device).type == "cuda":
        return "torch-int_mm"
    return "torch-widen" if dynamic_native_reason() is not None else _NATIVE.best


def pack_dynamic(q: torch.Tensor) -> torch.Tensor:
    """Lays out int8 weights [outputs, inner] for `int8_dynamic` on their device.

    For the C++ operator: q + 128 as uint8 [tiles, groups, TILE, GROUP]: one register holds GROUP inputs of as many
    outputs as it has 32-bit lanes; padded with zeros. Elsewhere: int8 [outputs, inner], on CUDA filled up with zeros to
    multiples of CUDA_STEP. Raises ValueError when q is not an int8 matrix, or has more than MOST_INNER inputs.
    """
    if q.dim() != 2 or q.dtype != torch.int8:
        raise ValueError(f"pack_dynamic needs an int8 matrix, not {named(q)}.")
    if q.shape[1] > MOST_INNER:
        raise ValueError(f"pack_dynamic takes at most {MOST_INNER} inputs, not {q.shape[1]}.")
    if not int8_dynamic_backend(q.device).startswith("native"):
        step = 1 if q.device.type == "cpu" else CUDA_STEP
        return _filled(q, step, step).contiguous()
    filled = _filled(q, TILE, GROUP)
    tiles, groups = filled.shape[0] // TILE, filled.shape[1] // GROUP
    return (filled.view(torch.uint8) ^ 128).view(tiles, TILE, groups, GROUP).transpose(1, 2).contiguous()


def int8_dynamic(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """y = (round(x / s) @ q.T) * s * scale + bias with s = max |x| / 127 of each row. Has no gradient.

    x: float32, bfloat16 or float16 [..., inner]; packed: what `pack_dynamic` returned; scale and bias: float32
    [outputs]. Returns [..., outputs] in x's type. `instruction_set`: a path of the C++ operator, from INSTRUCTION_SETS.
    Traces into one graph under torch.compile(fullgraph=True). A row with NaN or infinity gives no finite number. Raises
    ValueError for shapes and types that do not fit.
    """
    _check(x, packed, scale, bias)
    if packed.dim() == 2:
        # The same by torch's operators. packed: int8, on CUDA with outputs and inputs filled up with zeros.
        rows = x.reshape(-1, x.shape[-1])
        q, row_scale = quantize_tokens(rows)
        if x.device.type == "cuda":
            # torch._int_mm takes no fewer rows and inputs on CUDA: zeros fill up q.
            missing = (0, packed.shape[1] - q.shape[1], 0, max(0, CUDA_ROWS - q.shape[0]))
            product = torch._int_mm(torch.nn.functional.pad(q, missing), packed.T)
            sums = product[: rows.shape[0], : scale.shape[0]].float()
        else:
            # On a CPU without VNNI torch._int_mm saturates at 16 bits, and a single input gives noise (torch 2.13).
            sums = q.float() @ packed.float().T
        scaled = sums * (row_scale * scale)
        scaled = scaled if bias is None else scaled + bias
        return scaled.to(x.dtype).view(*x.shape[:-1], scale.shape[0])
    known = x.float() if x.dtype == torch.float16 else x  # the C++ operator knows the other two types
    y: torch.Tensor = torch.ops.optigpu.int8_dynamic(known, packed, scale, bias, instruction_set)
    return y.to(x.dtype)


def _filled(q: torch.Tensor, outputs: int, inner: int) -> torch.Tensor:
    return torch.nn.functional.pad(q, (0, -q.shape[1] % inner, 0, -q.shape[0] % outputs))


def _check(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_activations(x, "int8_dynamic")
    if (packed.dim(), packed.dtype) not in ((2, torch.int8), (4, torch.uint8)):
        raise ValueError(
            f"int8_dynamic needs the weights as pack_dynamic() returns them, not {named(packed)}."
        )
    native = packed.dim() == 4
    inner = packed.shape[1] * GROUP if native else packed.shape[1]
    step = GROUP if native else CUDA_STEP
    if not 0 <= inner - x.shape[-1] < step:
        raise ValueError(f"The weights take {inner - step + 1} to {inner} inputs; x has {x.shape[-1]}.")
    outputs = packed.shape[0] * TILE if native else packed.shape[0]
    fits = scale.dim() == 1 and 0 <= outputs - scale.shape[0] < (TILE if native else CUDA_STEP)
    if scale.dtype != torch.float32 or not fits:
        raise ValueError(f"int8_dynamic needs one float32 scale per output, not {named(scale)}.")
    check_bias(bias, scale.shape[0], "int8_dynamic")
