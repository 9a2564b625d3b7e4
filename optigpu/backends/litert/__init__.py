"""The litert backend: .tflite files in LiteRT with XNNPACK's operators, through the package ai-edge-litert.

It runs the file that microcontrollers run, so that a host stands beside them. Only `start` and `prepare` import LiteRT;
nothing here needs TensorFlow.
"""

from optigpu.backends.engine import EngineBackend

PACKAGE = "ai-edge-litert"


class LiteRtBackend(EngineBackend):
    """Classifies images on a CPU. The file is as it was converted, so no technique applies to it."""

    name = "litert"
    summary = "image classifiers as .tflite files in LiteRT with XNNPACK, on a CPU"
    packages = (PACKAGE,)
    install = f"pip install {PACKAGE}"
    workloads = ("classify",)
