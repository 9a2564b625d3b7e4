"""What training needs of a GPU's memory with each of several stacks, by the needs of a step that were predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optigpu.backends.training import TrainingNeed
from optigpu.hardware.catalog import Device
from optigpu.techniques.base import Technique
from optigpu.vocabulary import Frozen, SpecError
from optigpu.workloads.train_step import TrainStep

TIMES = 4
"""How many times larger the second batch is, from which the bytes of a sample follow."""
USUAL: tuple[tuple[str, ...], ...] = (
    (),
    ("mixed_precision",),
    ("gradient_checkpointing",),
    ("mixed_precision", "gradient_checkpointing"),
    ("mixed_precision", "gradient_checkpointing", "optimizer_in_backward"),
)


class StackNeeds(Frozen):
    """What a step needs with one stack, for each of several batches, or the reason why that cannot be predicted."""

    needs: tuple[TrainingNeed, ...] = ()
    reason: str | None = None


class TrainingFit(Frozen):
    """What one stack needs for a step, predicted. `state_bytes` are the optimizer's states, `step_bytes` gradients and
    activations at the peak. `largest_batch` is 0 where not even one sample fits."""

    label: str
    weight_bytes: int | None = None
    state_bytes: int | None = None
    step_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool = False
    largest_batch: int | None = None
    reason: str | None = None


class FitOfTraining(Frozen):
    """The stacks of a model on a card; `sequence_tokens` are those of a row."""

    basis: Literal["predicted"] = "predicted"
    model: str
    gpu: str
    memory_bytes: int
    usable_bytes: int
    batch: int
    sequence_tokens: int
    stacks: tuple[TrainingFit, ...]


@dataclass(frozen=True)
class TrainingAsked:
    """Whether steps of `batch` rows fit a card, of which `reserve_bytes` are kept free. Raises SpecError where these
    leave nothing."""

    model: str
    card: Device
    batch: int
    sequence_tokens: int
    reserve_bytes: int

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise SpecError(
                f"reserve: {self.reserve_bytes} bytes leave nothing of {self.card.name}; reserve less."
            )

    @property
    def usable_bytes(self) -> int:
        return (self.card.memory_bytes or 0) - self.reserve_bytes

    @property
    def workloads(self) -> tuple[TrainStep, ...]:
        """The steps whose needs tell it: of one row, of several, and of those that are asked for."""
        sizes = (1, 1 + TIMES, self.batch)
        return tuple(TrainStep(batch_size=size, sequence_tokens=self.sequence_tokens) for size in sizes)


def fit_of(
    asked: TrainingAsked, stacks: Sequence[tuple[Technique, ...]], needs: Sequence[StackNeeds]
) -> FitOfTraining:
    pairs = zip(stacks, needs, strict=True)
    return FitOfTraining(
        model=asked.model,
        gpu=asked.card.name,
        memory_bytes=asked.card.memory_bytes or 0,
        usable_bytes=asked.usable_bytes,
        batch=asked.batch,
        sequence_tokens=asked.sequence_tokens,
        stacks=tuple(_row(stack, found, asked.usable_bytes) for stack, found in pairs),
    )


def _row(stack: tuple[Technique, ...], found: StackNeeds, usable: int) -> TrainingFit:
    label = " + ".join(technique.name for technique in stack) or "fp32"
    if found.reason is not None:
        return TrainingFit(label=label, reason=found.reason)
    one, several, needed = found.needs
    # Beyond what a step needs in any case, a sample adds the same each time.
    slope = max(1, (several.peak_bytes - one.peak_bytes) // TIMES)
    largest = 1 + TIMES + (usable - several.peak_bytes) // slope
    return TrainingFit(
        label=label,
        weight_bytes=needed.weight_bytes,
        state_bytes=needed.held_bytes - needed.weight_bytes,
        step_bytes=needed.peak_bytes - needed.held_bytes,
        peak_bytes=needed.peak_bytes,
        fits=needed.peak_bytes <= usable,
        largest_batch=max(0, largest) if one.peak_bytes <= usable else 0,
    )
