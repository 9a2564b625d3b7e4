"""Hand-written kernels behind plain functions.

`int8_linear` and its companions are linear layers with int8 weights: C++ on CPUs, plain torch elsewhere.
To add a kernel: one source file, one Python file with its functions, its public names here.
"""

from optigpu.ops.build import compiler_reason
from optigpu.ops.int8_linear import int8_linear, int8_linear_backend, native_reason, pack, quantize_rows

__all__ = [
    "compiler_reason",
    "int8_linear",
    "int8_linear_backend",
    "native_reason",
    "pack",
    "quantize_rows",
]
