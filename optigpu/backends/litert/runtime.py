"""What workloads and meters ask of a classifier in LiteRT."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.litert import PACKAGE
from optigpu.backends.litert.model import LiteRtModel, TensorForm
from optigpu.backends.litert.source import source_of
from optigpu.backends.runtime import Images, MemoryPeaks, Pass, Profile
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import ImageFootprint
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

NOT_SAID = "LiteRT does not say which kernels run."
ON_CPU = "LiteRT runs on the CPU here, which has no memory of an accelerator."
NO_REVISION = "A file has no revision; the weight hash identifies it."


class LiteRtRuntime:
    """An ImageRuntime: a .tflite file, its operators delegated to XNNPACK where XNNPACK has them.

    Images come as float32 [batch, channels, height, width] and are laid out and quantized before what is timed; the
    scores are dequantized after it. They are what the file gives: of most classifiers probabilities.
    """

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no .tflite file of a classifier, or that LiteRT cannot run."""
        self.device, self.seed = order.device, order.seed
        self.notes = Notes()
        self._source = source_of(order.model)
        self.facts = self._source.facts
        self._given = TensorForm.of(self._source.model.inputs[0])
        self._scores = TensorForm.of(self._source.model.outputs[0])
        progress("loading")
        batch = order.workload.classified_images or 1
        self._model = LiteRtModel(self._source.path, self._source.model, batch, order.threads)
        self._record(order)

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        self._model.fill(self._given.stored(np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))))
        started = time.perf_counter_ns()
        scores = self._model.run()
        chosen = scores.argmax(axis=-1)
        seconds = (time.perf_counter_ns() - started) / 1e9
        return Pass(self._scores.real(scores), chosen, seconds)

    def observe(self, inputs: Images) -> None:
        """LiteRT does not name the kernels that it runs."""

    def compute_exactly(self) -> None:
        """Nothing: the file decides how exactly it computes, and no reference is made of it."""

    def weights(self) -> WeightFacts:
        """The file's hash, which is how devices name it, and the bytes of its constants."""
        source = self._source
        return WeightFacts(
            bytes=source.model.parameter_bytes,
            parameters=source.parameters,
            hash=source.sha256,
            hash_of="files",
            files={source.path.name: source.sha256},
            reasons={"revision": NO_REVISION},
        )

    def footprint(self) -> ImageFootprint:
        """A pass reads all constants; an operation is a multiplication or an addition."""
        side, channels = self.facts.image_size, self.facts.channels
        parameters, macs = self._source.model.parameter_bytes, self._source.macs
        return ImageFootprint(self.facts, parameters, 2 * macs, channels * side * side)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """LiteRT's profiler is a program of its own."""
        raise UnsupportedError("LiteRT has no profiler here; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()

    def _record(self, order: Order) -> None:
        model = self._source.model
        kinds = sorted({operator.name for operator in model.operators})
        self.notes.record(
            dtype=self._given.dtype,
            threads=order.threads,
            versions={PACKAGE: version(PACKAGE)},
            reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
            tflite_sha256=self._source.sha256,
            tflite_bytes=model.size,
            tflite_operators=kinds,
            tflite_macs=self._source.macs,
            tflite_kernels="those of XNNPACK where it has the operator, else those of LiteRT",
        )
