"""Compares how two prepared models learn: the losses of a few steps, and the norm of the first gradient."""

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.training import TrainingRuntime
from optigpu.documents.shapes import ModelFacts
from optigpu.selftest.setting import SEED
from optigpu.workloads.train_step import DrawnTexts, TrainStep

STEPS = 3


class Learned:
    """The losses of the plain model over STEPS steps with drawn documents, some of them shorter than a row."""

    def __init__(self, plain: TrainingRuntime, workload: TrainStep, facts: ModelFacts) -> None:
        texts, shortest = DrawnTexts(facts, SEED), workload.sequence_tokens // 2
        self._batches = [
            texts.batch(workload.batch_size, workload.sequence_tokens, shortest) for _ in range(STEPS)
        ]
        self._trained = _trained(plain)
        self._norm = plain.gradient_norm(self._batches[0])
        self._losses = self._losses_of(plain)

    def error_of(self, changed: TrainingRuntime) -> float:
        """The largest error of a loss, as a share of it; NaN if there is one.

        Where the same number of weights is trained, the error of the gradient's norm counts too.
        """
        errors = []
        if _trained(changed) == self._trained:
            errors.append(abs(changed.gradient_norm(self._batches[0]) / self._norm - 1))
        losses = self._losses_of(changed)
        return float(np.max([*errors, *np.abs(losses / self._losses - 1)]))

    def _losses_of(self, runtime: TrainingRuntime) -> NDArray[np.float64]:
        return np.array([runtime.step(batch).loss for batch in self._batches])


def _trained(runtime: TrainingRuntime) -> int | None:
    weights = runtime.weights()
    return weights.trainable if weights else None
