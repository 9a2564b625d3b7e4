"""The litert backend: .tflite files in LiteRT with XNNPACK's operators, through the package ai-edge-litert.

It runs the file that microcontrollers run, so that a host stands beside them. Only `start` and `prepare` import LiteRT;
nothing here needs TensorFlow.
"""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
from optigpu.backends.runtime import Runtime

PACKAGE = "ai-edge-litert"


class LiteRtBackend(EngineBackend):
    """Classifies images on a CPU. The file is as it was converted, so no technique applies to it."""

    name = "litert"
    summary = "image classifiers as .tflite files in LiteRT with XNNPACK, on a CPU"
    packages = (PACKAGE,)
    install = f"pip install {PACKAGE}"
    workloads = ("classify",)

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Loads the file that the reference names."""
        from optigpu.backends.litert.runtime import LiteRtRuntime

        return LiteRtRuntime(order, progress)
