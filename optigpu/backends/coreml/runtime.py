"""A Core ML package, as what workloads and meters ask of."""

from collections.abc import Callable

import coremltools
import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.coreml import INPUT, PACKAGE, admit, logits_in, package_of
from optigpu.backends.engine import SteppedRuntime, unknown_kernels
from optigpu.backends.runtime import Ids, Logits
from optigpu.models.described import decoder_facts
from optigpu.techniques.base import Notes

ENGINE = "Core ML"


def prepared(order: Order, progress: Callable[[str], None]) -> SteppedRuntime:
    """Writes the package for the workload if it is not kept already.

    Raises UnsupportedError for a model that cannot be converted, OptiGPUError when converting fails.
    """
    facts = decoder_facts(order.reference)

    def steps(rows: int, length: int) -> "PackageSteps":
        path = package_of(order, rows, length, progress)
        with whole(path, ENGINE):
            model = coremltools.models.MLModel(str(path / PACKAGE), compute_units=coremltools.ComputeUnit.ALL)
        return PackageSteps(model, rows, length)

    admit(order)  # a stack that it cannot apply is refused before anything is converted
    notes = Notes()
    notes.record(
        dtype="float32",
        kv_cache="none",
        decode_loop=ENGINE,
        decode_operator="MLModel.predict",
        versions={"coremltools": coremltools.__version__},
        reasons=unknown_kernels("Core ML does not say which kernels of attention run."),
    )
    weights = weights_of(order)
    return SteppedRuntime(
        order, notes, engine=ENGINE, facts=facts, steps=steps, weights=weights, footprint=None
    )


class PackageSteps:
    """Sequences that are computed as a whole in each pass; what follows a token cannot change it."""

    def __init__(self, model: coremltools.models.MLModel, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._model = model
        self._ids = np.zeros((self.rows, self.length), np.int32)
        self._used = 0

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0

    def forward(self, tokens: Ids) -> Logits:
        """Logits after the last of `tokens` [rows, count], [rows, vocabulary]."""
        self._ids[:, self._used : self._used + tokens.shape[1]] = tokens
        self._used += tokens.shape[1]
        return logits_in(self._model.predict({INPUT: self._ids}), self._used - 1)

    def close(self) -> None:
        """The package is freed with its last reference."""
        del self._model
