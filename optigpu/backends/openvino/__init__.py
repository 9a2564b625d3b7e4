"""The openvino backend: models in OpenVINO's own format, converted here, on a CPU.

Without a technique a variant is the baseline: weights, products, keys and values in float32. Only `start` and
`prepare` import OpenVINO.
"""

from optigpu.backends.engine import EngineBackend


class OpenVinoBackend(EngineBackend):
    """Decodes and classifies on a CPU, what transformers has a model of and OpenVINO can convert."""

    name = "openvino"
    summary = "decoders and image classifiers in OpenVINO's format, on a CPU"
    packages = ("openvino", "nncf")
    install = 'pip install -e ".[openvino]"'
    workloads = ("generate", "quality", "classify")
