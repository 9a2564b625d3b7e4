"""optigpu's QuantizedLinear under a name of its own."""

from optigpu.facade.quantized_linear import QuantizedLinear as QuantizedLinear
from optigpu.facade.quantized_linear import replace_linears as replace_linears

__all__ = ["QuantizedLinear", "replace_linears"]
