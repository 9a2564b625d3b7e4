"""The onnxruntime backend: ONNX graphs in ONNX Runtime's CPU provider, text as well as images.

Without a technique a variant is the baseline: weights, keys and values in float32, the graph rewritten as far as the
engine can. Only `start` and `prepare` import ONNX Runtime.
"""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
from optigpu.backends.runtime import Runtime


class OnnxRuntimeBackend(EngineBackend):
    """Decodes and classifies on a CPU."""

    name = "onnxruntime"
    summary = "decoders and image classifiers as ONNX graphs in ONNX Runtime, on a CPU"
    packages = ("onnxruntime", "onnx")
    install = 'pip install -e ".[onnxruntime]"'
    workloads = ("generate", "prefill", "quality", "classify")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's graph if it is not kept already, and loads it."""
        from optigpu.backends.onnxruntime.runtime import prepared

        return prepared(order, progress)
