"""The openvino backend: models in OpenVINO's own format, converted here, on a CPU.

Without a technique a variant is the baseline: weights, products, keys and values in float32. Only `start` and
`prepare` import OpenVINO.
"""

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import allocation_failed, no_operators, packages_missing, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.base import Workload

PACKAGES = ("openvino", "nncf")
INSTALL = 'pip install -e ".[openvino]"'
WORKLOADS = ("generate", "quality", "classify")


class OpenVinoBackend:
    """Decodes and classifies on a CPU, what transformers has a model of and OpenVINO can convert."""

    name: ClassVar[str] = "openvino"
    summary: ClassVar[str] = "decoders and image classifiers in OpenVINO's format, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """The packages of the extra `openvino` that are not installed."""
        return packages_missing(PACKAGES, environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation, the scoring of text, and classification of random images."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports OpenVINO."""
        import_module(f"{__name__}.decoding")
        import_module(f"{__name__}.images")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Converts the model if it is not kept already, and compiles it."""
        if order.workload.task is Task.IMAGES:
            from optigpu.backends.openvino.images import OpenVinoImages

            return OpenVinoImages(order, progress)
        from optigpu.backends.openvino.decoding import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """OpenVINO is not asked for single operators."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """Nothing: a model is told its threads when it is compiled."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """OpenVINO passes on what C++ says when it cannot allocate."""
        return allocation_failed(error)
