"""optigpu's one-line quantization under the name `gpu_poor`."""

from optigpu.facade.quantized import make_it_work_hybrid as make_it_work_hybrid
from optigpu.facade.quantized import quantize as quantize

__all__ = ["make_it_work_hybrid", "quantize"]
