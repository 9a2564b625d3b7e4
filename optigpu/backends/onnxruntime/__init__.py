"""The onnxruntime backend: ONNX graphs in ONNX Runtime's CPU provider, text as well as images.

Without a technique a variant is the baseline: weights, keys and values in float32, the graph rewritten as far as the
engine can. Only `start` and `prepare` import ONNX Runtime.
"""

from optigpu.backends.engine import EngineBackend


class OnnxRuntimeBackend(EngineBackend):
    """Decodes and classifies on a CPU."""

    name = "onnxruntime"
    summary = "decoders and image classifiers as ONNX graphs in ONNX Runtime, on a CPU"
    packages = ("onnxruntime", "onnx")
    install = 'pip install -e ".[onnxruntime]"'
    workloads = ("generate", "prefill", "quality", "classify")
