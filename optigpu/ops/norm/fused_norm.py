"""The addition of a residual and the norm after it as one operation: for `fused_layernorm` and `fused_rmsnorm`.

    norm_backend("cpu")                                         # once, before anything is traced
    normed, summed = add_rms_norm(x, residual, weight, eps)     # summed = x + residual, normed = its norm

On a CPU with a compiler these are our C++ operators (fused_norm.cpp), on CUDA with Triton our kernel (triton_norm.py);
elsewhere they are plain torch, and `norm_backend` says which.
"""

import functools
import importlib.util
from typing import Literal

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, sources
from optigpu.ops.operands import named

NormBackend = Literal["native-avx512", "native-avx2", "native-portable", "triton", "torch"]

NORM_INSTRUCTION_SETS: dict[NormBackend, int] = {"native-portable": 1, "native-avx2": 2, "native-avx512": 3}
"""The operators' numbers; the enumeration InstructionSet in fused_norm.cpp."""
TRITON_WIDTH = 2**15
"""The longest row that one program of the Triton kernel holds in its registers; longer ones are left to plain torch."""
_SOURCES = sources(__file__, "fused_norm.cpp", "fused_norm.h")
_NATIVE = NativeOperators(
    _SOURCES,
    "optigpu_best_norm_instruction_set",
    {
        "layer_norm": lambda x, *_, **__: x.new_empty(x.shape),
        "rms_norm": lambda x, *_, **__: x.new_empty(x.shape),
        "add_layer_norm": lambda x, *_, **__: (x.new_empty(x.shape), x.new_empty(x.shape)),
        "add_rms_norm": lambda x, *_, **__: (x.new_empty(x.shape), x.new_empty(x.shape)),
    },
    NORM_INSTRUCTION_SETS,
)
native_norm_reason = _NATIVE.reason
_BACKENDS: dict[str, NormBackend] = {}
"""The backend by device type, filled at the first query: traced code can read this, but cannot build the operators."""


def norm_backend(device: torch.device | str) -> NormBackend:
    """The backend of the norms on `device` in this process. Builds the C++ operators if they can be built.

    Call it once before anything that uses them on this device is compiled: a build cannot be traced.
    """
    kind = torch.device(device).type
    if kind in _BACKENDS:
        return _BACKENDS[kind]
    if kind == "cuda" and importlib.util.find_spec("triton") is not None:
        _BACKENDS[kind] = "triton"
    else:
        _BACKENDS[kind] = "torch" if kind != "cpu" or native_norm_reason() is not None else _NATIVE.best
    return _BACKENDS[kind]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm (Ba et al., 2016, arXiv:1607.06450) of x + residual over the last dimension. Has no gradient.

    x and residual: floating point [..., width]; weight and bias: [width]. Returns `(normed, summed)`, both
    [..., width]: the sum as its type stores it, and the norm of what is stored, computed in float32 (in float64 for
    float64). Without a residual `summed` is x itself. Operands of several types are added by torch, and normed in the
    type that torch promotes them to. `instruction_set` picks one path of the C++ operator by its number in
    NORM_INSTRUCTION_SETS. Traces into one graph under torch.compile(fullgraph=True).
    Raises ValueError for shapes and types that do not fit.
    """
    if not _is_native(x, residual, weight, bias):
        return _elsewhere(x, residual, weight, bias, eps, is_rms=False)
    try:
        if residual is None:
            return torch.ops.optigpu.layer_norm(x, weight, bias, eps, instruction_set), x
        normed, summed = torch.ops.optigpu.add_layer_norm(x, residual, weight, bias, eps, instruction_set)
    except RuntimeError:
        _check(x, residual, weight, bias)
        raise
    return normed, summed


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) of x + residual; all else is as in `add_layer_norm`."""
    if not _is_native(x, residual, weight):
        return _elsewhere(x, residual, weight, None, eps, is_rms=True)
    try:
        if residual is None:
            return torch.ops.optigpu.rms_norm(x, weight, eps, instruction_set), x
        normed, summed = torch.ops.optigpu.add_rms_norm(x, residual, weight, eps, instruction_set)
    except RuntimeError:
        _check(x, residual, weight)
        raise
    return normed, summed


def _is_native(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the C++ operators take these tensors: on a CPU, of one type. They check shapes themselves, for speed."""
    dtype = x.dtype
    if not x.is_cpu or dtype == torch.float64:
        return False
    for other in others:
        if other is not None and other.dtype != dtype:
            return False
    return (_BACKENDS.get("cpu") or norm_backend("cpu")) != "torch"


def _elsewhere(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of tensors that the C++ operators do not take: of several types, or not on a CPU."""
    _check(x, residual, weight, bias)
    dtypes = [tensor.dtype for tensor in (x, residual, weight, bias) if tensor is not None]
    dtype = functools.reduce(torch.promote_types, dtypes)
    if any(given != dtype for given in dtypes):
        summed = x if residual is None else x + residual
        weight, bias = (row if row is None else row.to(dtype) for row in (weight, bias))
        wide = summed.to(dtype)
        if is_rms:
            return add_rms_norm(wide, None, weight, eps)[0], summed
        return add_layer_norm(wide, None, weight, bias, eps)[0], summed
    if norm_backend(x.device) == "triton" and dtype != torch.float64 and x.shape[-1] <= TRITON_WIDTH:
        from optigpu.ops.norm.triton_norm import triton_add_norm

        return triton_add_norm(x, residual, weight, bias, eps, is_rms)
    summed = x if residual is None else x + residual
    wide_type = torch.promote_types(dtype, torch.float32)
    weight, bias = (row if row is None else row.to(wide_type) for row in (weight, bias))
    wide, shape = summed.to(wide_type), summed.shape[-1:]
    if is_rms:
        normed = torch.nn.functional.rms_norm(wide, shape, weight, eps)
    else:
        normed = torch.nn.functional.layer_norm(wide, shape, weight, bias, eps)
    return normed.to(dtype), summed


def _check(x: torch.Tensor, residual: torch.Tensor | None, *rows: torch.Tensor | None) -> None:
    shape = x.shape
    if not shape or shape[-1] == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point [..., width], not {named(x)}.")
    if residual is not None and (residual.shape != shape or not residual.is_floating_point()):
        raise ValueError(f"residual must be floating point {list(shape)}, as x is, not {named(residual)}.")
    for row in rows:
        if row is not None and (row.dim() != 1 or row.shape[0] != shape[-1] or not row.is_floating_point()):
            raise ValueError(f"weight and bias must be floating point [{shape[-1]}], not {named(row)}.")
