"""The tensorflow backend: Keras models of image classifiers in TensorFlow.

It runs the float model that `optigpu convert` makes a .tflite file of, so that both stand side by side; the file itself
is run by the backend litert. Only `start` and `prepare` import TensorFlow, which shares no process with Triton.
"""

import os

from optigpu.backends.engine import EngineBackend
from optigpu.documents.result import Environment
from optigpu.engines.environments import not_installed

PACKAGES = ("tensorflow", "tensorflow-cpu")
"""The same package, with and without its GPU libraries."""


class TensorFlowBackend(EngineBackend):
    """Classifies images on a CPU, as a tf.function in float32."""

    name = "tensorflow"
    summary = "image classifiers as .keras files in TensorFlow, on a CPU"
    workloads = ("classify",)

    def missing(self, environment: Environment) -> str | None:
        """TensorFlow, where it is neither here nor in an environment of its own."""
        if any(package in environment.software for package in PACKAGES):
            return None
        return not_installed(self.name)

    def use_threads(self, count: int) -> None:
        """TensorFlow reads them when it is loaded."""
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(count)
        os.environ["TF_NUM_INTEROP_THREADS"] = "1"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings about what it was built for

    def is_out_of_memory(self, error: Exception) -> bool:
        """TensorFlow's own class of error, by its name."""
        return isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError"
