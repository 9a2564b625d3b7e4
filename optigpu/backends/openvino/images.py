"""An image classifier in OpenVINO, as what workloads and meters ask of."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.openvino.contents import contents_of
from optigpu.backends.openvino.decoding import ENGINE, described, multiplied
from optigpu.backends.openvino.model import OpenVinoModel
from optigpu.backends.openvino.settings import classifier_of, properties_of
from optigpu.backends.runtime import Images, MemoryPeaks, Pass, Profile
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import ImageFacts, ImageFootprint
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import UnsupportedError

ON_CPU = "OpenVINO runs on the CPU here, which has no memory of an accelerator."


class OpenVinoImages:
    """An ImageRuntime: a graph of one shape, which is compiled anew for another number of images."""

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no preset of a classifier, OptiGPUError when writing fails."""
        self.device, self.seed = order.device, order.seed
        self.facts = _facts(order)
        side = order.workload.image_side or self.facts.image_size
        self._folder = classifier_of(order, side, progress)
        self._properties = properties_of(engine_options(order.stack), order.threads)
        progress("compiling")
        shape = (order.workload.classified_images or 1, self.facts.channels, side, side)
        with whole(self._folder, ENGINE):
            self._contents = contents_of(self._folder)
            self._compile(shape)
        self._weights = weights_of(order)
        self.notes = described(self._model, self._contents)
        self.notes.record(attention_kernels=self._model.attention)

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        if inputs.shape != self._shape:
            self._compile(inputs.shape)
        given = [np.ascontiguousarray(inputs)]
        started = time.perf_counter_ns()
        self._request.infer(given, share_inputs=True, share_outputs=True)
        logits = self._request.get_output_tensor(0).data
        chosen = logits.argmax(axis=-1)
        seconds = (time.perf_counter_ns() - started) / 1e9
        return Pass(logits.copy(), chosen, seconds)

    def observe(self, inputs: Images) -> None:
        """The compiled graph named its kernels already."""

    def compute_exactly(self) -> None:
        """Nothing: products are of float32."""

    def weights(self) -> WeightFacts:
        """The bytes of the constants; the hash is that of the weights that they were converted from."""
        own = self._contents.figures
        return self._weights.model_copy(update=own)

    def footprint(self) -> ImageFootprint:
        """A pass reads all constants."""
        products = multiplied(self._model, self._contents)
        pixels = int(np.prod(self._shape[1:]))
        return ImageFootprint(
            self.facts, self._contents.bytes, self._contents.notes["flops"], pixels, products
        )

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """OpenVINO counts time by layers, which is no trace."""
        raise UnsupportedError("OptiGPU has no profiler for OpenVINO; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()

    def _compile(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._model = OpenVinoModel(self._folder, self._properties, shape)
        self._request = self._model.request()


def _facts(order: Order) -> ImageFacts:
    reference = parse_reference(str(order.model))
    facts = known_facts(reference)
    if not isinstance(facts, ImageFacts):
        raise UnsupportedError(
            f"openvino cannot classify with {reference}: only presets of image classifiers are converted; name one, "
            "for example preset:resnet-50."
        )
    return facts
