"""The TrainingRuntime of a transformers model."""

from collections.abc import Callable
from pathlib import Path

from optigpu.backends.runtime import MemoryPeaks
from optigpu.backends.torch.memory import operator_peaks_of
from optigpu.backends.torch.runtime import TorchModelRuntime
from optigpu.backends.torch.training.flops import flops_of
from optigpu.backends.torch.training.model import TrainableModel
from optigpu.backends.training import StepFlops, TrainedStep, TrainingBatch
from optigpu.documents.facts import WeightFacts
from optigpu.vocabulary import DeviceKind


class TorchTrainingRuntime(TorchModelRuntime):
    """Steps of training of a transformers model."""

    def __init__(self, applied: TrainableModel, folder: Path) -> None:
        super().__init__(applied, folder)
        self.training = applied
        self.facts = applied.facts

    def weights(self) -> WeightFacts:
        """As of every model, and how many weights are trained."""
        return super().weights().model_copy(update={"trainable": self.training.trainable})

    def footprint(self) -> None:
        """None: the operations of a step are counted instead."""

    def step(self, batch: TrainingBatch) -> TrainedStep:
        """One timed step."""
        return self.training.step(batch)

    def restart(self) -> None:
        """As before the first step."""
        self.training.restart()

    def gradient_norm(self, batch: TrainingBatch) -> float:
        """Of the mean loss."""
        return self.training.gradient_norm(batch)

    def step_flops(self, batch: TrainingBatch) -> StepFlops:
        """Counted operator by operator, forward and backward."""
        return flops_of(self.training.trainer, batch)

    def observe(self, batch: TrainingBatch) -> None:
        """Records which attention kernels run."""
        self.training.observe(batch)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """CUDA's allocator's; on a CPU weights, states of the optimizer, and all that torch allocates in the step."""
        if self.device is DeviceKind.CPU:
            return operator_peaks_of(run, self.training.held())
        return super().peak_memory(run)
