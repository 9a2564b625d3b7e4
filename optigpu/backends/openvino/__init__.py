"""The openvino backend: models in OpenVINO's own format, converted here, on a CPU.

Without a technique a variant is the baseline: weights, products, keys and values in float32. Only `start` and
`prepare` import OpenVINO.
"""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
from optigpu.backends.runtime import Runtime


class OpenVinoBackend(EngineBackend):
    """Decodes and classifies on a CPU, what transformers has a model of and OpenVINO can convert."""

    name = "openvino"
    summary = "decoders and image classifiers in OpenVINO's format, on a CPU"
    packages = ("openvino", "nncf")
    install = 'pip install -e ".[openvino]"'
    workloads = ("generate", "quality", "classify")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Converts the model if it is not kept already, and compiles it."""
        from optigpu.backends.openvino.runtime import prepared

        return prepared(order, progress)
