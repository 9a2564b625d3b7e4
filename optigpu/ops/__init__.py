"""Hand-written kernels behind plain functions.

`int8_linear` and its companions are linear layers with int8 weights: C++ on CPUs, plain torch elsewhere.
`int8_dynamic` quantizes the activations as well.
`int4_linear` has 4-bit weights in groups.
`bias_gelu` and `swiglu` are activations with the bias before them, in one pass.
`decode` is a package of its own: decoders as data, and the operators that run whole steps of them.
`add_layer_norm` and `add_rms_norm` are norms with the residual's addition before them, in one pass.
To add a kernel: one source file, one Python file with its functions, its public names here.
"""

from optigpu.ops.activation.fused_activation import activation_backend, bias_gelu, swiglu
from optigpu.ops.build import compiler_reason
from optigpu.ops.four_bits.quantize import Int4Scheme, quantize_groups
from optigpu.ops.linear.int4_linear import int4_linear, int4_linear_backend, pack_int4
from optigpu.ops.linear.int8_dynamic import int8_dynamic, int8_dynamic_backend, pack_dynamic, quantize_tokens
from optigpu.ops.linear.int8_linear import (
    int8_linear,
    int8_linear_backend,
    native_reason,
    pack,
    quantize_rows,
)
from optigpu.ops.norm.fused_norm import add_layer_norm, add_rms_norm, norm_backend

__all__ = [
    "Int4Scheme",
    "activation_backend",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "compiler_reason",
    "int4_linear",
    "int4_linear_backend",
    "int8_dynamic",
    "int8_dynamic_backend",
    "int8_linear",
    "int8_linear_backend",
    "native_reason",
    "norm_backend",
    "pack",
    "pack_dynamic",
    "pack_int4",
    "quantize_groups",
    "quantize_rows",
    "quantize_tokens",
    "swiglu",
]
