"""A linear layer's bias and the activation after it as one operation: the operators of `fused_gelu` and `fused_swiglu`.

    activation_backend("cpu")                     # once, before anything is traced
    y = bias_gelu(x, bias, "tanh")                # gelu(x + bias)
    y = swiglu(x, bias)                           # silu(gate) * up, where x + bias = [gate | up]

On a CPU with a compiler these are our C++ operators (fused_activation.cpp), on CUDA with Triton our kernels
(triton_activation.py); elsewhere they are plain torch, and `activation_backend` says which. All compute in float32,
whatever is stored, and round once.
"""

import importlib
import importlib.util
from typing import Literal

import torch

from optigpu.ops.build import BEST_INSTRUCTION_SET, NativeOperators, sources
from optigpu.ops.operands import named

ActivationBackend = Literal["native-avx512", "native-avx2", "native-portable", "triton", "torch"]
Approximation = Literal["none", "tanh"]

ACTIVATION_INSTRUCTION_SETS: dict[ActivationBackend, int] = {
    "native-portable": 1,
    "native-avx2": 2,
    "native-avx512": 3,
}
"""The operators' numbers; the enumeration InstructionSet in fused_activation.cpp."""
_SOURCES = sources(__file__, "fused_activation.cpp", "fused_activation.h", "../vector_math.h")
_NATIVE = NativeOperators(
    _SOURCES,
    "optigpu_best_activation_instruction_set",
    {
        "bias_gelu": lambda x, *_, **__: x.new_empty(x.shape),
        "swiglu": lambda x, *_, **__: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    },
    ACTIVATION_INSTRUCTION_SETS,
)
native_activation_reason = _NATIVE.reason
_BACKENDS: dict[str, ActivationBackend] = {}
"""The backend by device type, filled at the first query: traced code can read this, but cannot build the operators."""


def activation_backend(device: torch.device | str) -> ActivationBackend:
    """The backend of the activations on `device` in this process. Builds the C++ operators if they can be built.

    Call it once before anything that uses them on this device is compiled: a build cannot be traced.
    """
    kind = torch.device(device).type
    if kind in _BACKENDS:
        return _BACKENDS[kind]
    if kind == "cuda" and importlib.util.find_spec("triton") is not None:
        # Now: what is traced cannot load Triton.
        importlib.import_module("optigpu.ops.activation.triton_activation")
        _BACKENDS[kind] = "triton"
    else:
        _BACKENDS[kind] = "torch" if kind != "cpu" or native_activation_reason() is not None else _NATIVE.best
    return _BACKENDS[kind]


def activation_reason(device: torch.device | str) -> str | None:
    """Why the activations on `device` are plain torch, in one sentence; None where they have kernels."""
    kind = torch.device(device).type
    if activation_backend(kind) != "torch":
        return None
    if kind == "cpu":
        return native_activation_reason()
    return f"The activations' kernels for {kind} need Triton: install the version that belongs to this torch."


def bias_gelu(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: Approximation = "none",
    instruction_set: int = BEST_INSTRUCTION_SET,
) -> torch.Tensor:
    """gelu(x + bias) (Hendrycks and Gimpel, 2016, arXiv:1606.08415). Has no gradient.

    x: floating point [..., columns]; bias: floating point [columns], of any type; returns x's shape and type.
    `approximate` is torch's name for the form: "none" for x Phi(x), "tanh" for the approximation that GPT-2 uses.
    `instruction_set` picks one path of the C++ operator by its number in ACTIVATION_INSTRUCTION_SETS. float64 is
    computed in float64 by torch. Traces into one graph under torch.compile(fullgraph=True).
    Raises ValueError for shapes and types that do not fit.
    """
    _check(x, bias)
    backend = _backend_for(x)
    if backend == "torch":
        return torch.nn.functional.gelu(_biased(x, bias), approximate=approximate).to(x.dtype)
    is_tanh = approximate == "tanh"
    if backend == "triton":
        from optigpu.ops.activation.triton_activation import triton_bias_gelu

        y: torch.Tensor = triton_bias_gelu(x, bias, is_tanh)
    else:
        y = torch.ops.optigpu.bias_gelu(x, bias, is_tanh, instruction_set)
    return y


def swiglu(
    x: torch.Tensor, bias: torch.Tensor | None = None, instruction_set: int = BEST_INSTRUCTION_SET
) -> torch.Tensor:
    """silu(gate) * up, where x + bias = [gate | up] (Shazeer, 2020, arXiv:2002.05202). Has no gradient.

    x: floating point [..., 2 * inner]; bias: [2 * inner]; returns [..., inner]. All else is as in `bias_gelu`.
    """
    _check(x, bias)
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu needs an even last dimension, [..., gate | up], not {named(x)}.")
    backend = _backend_for(x)
    if backend == "torch":
        gate, up = _biased(x, bias).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)
    if backend == "triton":
        from optigpu.ops.activation.triton_activation import triton_swiglu

        y: torch.Tensor = triton_swiglu(x, bias)
    else:
        y = torch.ops.optigpu.swiglu(x, bias, instruction_set)
    return y


def _backend_for(x: torch.Tensor) -> ActivationBackend:
    return "torch" if x.dtype == torch.float64 else activation_backend(x.device)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return wide if bias is None else wide + bias.to(wide.dtype)


def _check(x: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point [..., columns], not {named(x)}.")
    if bias is not None and (bias.shape != x.shape[-1:] or not bias.is_floating_point()):
        raise ValueError(f"bias must be floating point [{x.shape[-1]}], not {named(bias)}.")
