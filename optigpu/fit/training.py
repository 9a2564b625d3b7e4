"""What training needs of a GPU's memory with each of several stacks, predicted by a process that loads torch."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from optigpu.hardware.catalog import Device
from optigpu.vocabulary import Frozen, OptiGPUError, SpecError

PREDICTOR = (sys.executable, "-P", "-m", "optigpu.child.training_memory")
TIMES = 4
"""How many times larger the second batch is, from which the bytes of a sample follow."""
USUAL: tuple[tuple[str, ...], ...] = (
    (),
    ("mixed_precision",),
    ("gradient_checkpointing",),
    ("mixed_precision", "gradient_checkpointing"),
    ("mixed_precision", "gradient_checkpointing", "optimizer_in_backward"),
)


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


def fit_training(
    model: str,
    card: Device,
    stacks: Sequence[Sequence[Mapping[str, Any]]],
    *,
    batch: int,
    sequence_tokens: int,
    reserve_bytes: int,
) -> FitOfTraining:
    """Predicts every stack. Raises OptiGPUError if the predicting process fails."""
    memory = card.memory_bytes or 0
    usable = memory - reserve_bytes
    if usable <= 0:
        raise SpecError(f"reserve: {reserve_bytes} bytes leave nothing of {card.name}; reserve less.")
    answers = _predicted(model, stacks, (1, 1 + TIMES, batch), sequence_tokens)
    pairs = zip(stacks, answers, strict=True)
    rows = tuple(_row(stack, answer, usable) for stack, answer in pairs)
    return FitOfTraining(
        model=model,
        gpu=card.name,
        memory_bytes=memory,
        usable_bytes=usable,
        batch=batch,
        sequence_tokens=sequence_tokens,
        stacks=rows,
    )


def _row(stack: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], usable: int) -> TrainingFit:
    label = " + ".join(str(each["name"]) for each in stack) or "fp32"
    if "reason" in answer:
        return TrainingFit(label=label, reason=answer["reason"])
    one, several, asked = answer["needs"]
    # Beyond what a step needs in any case, a sample adds the same each time.
    slope = max(1, (several["peak_bytes"] - one["peak_bytes"]) // TIMES)
    room = usable - several["peak_bytes"]
    largest = 1 + TIMES + room // slope
    return TrainingFit(
        label=label,
        weight_bytes=asked["weight_bytes"],
        state_bytes=asked["held_bytes"] - asked["weight_bytes"],
        step_bytes=asked["peak_bytes"] - asked["held_bytes"],
        peak_bytes=asked["peak_bytes"],
        fits=asked["peak_bytes"] <= usable,
        largest_batch=max(0, largest) if one["peak_bytes"] <= usable else 0,
    )


def _predicted(
    model: str, stacks: Sequence[Sequence[Mapping[str, Any]]], batches: Sequence[int], tokens: int
) -> list[dict[str, Any]]:
    workloads = [{"kind": "train_step", "batch_size": size, "sequence_tokens": tokens} for size in batches]
    asked = {"model": model, "stacks": [list(stack) for stack in stacks], "workloads": workloads}
    done = subprocess.run(PREDICTOR, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise OptiGPUError(f"The memory of training {model} could not be predicted ({why}).")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
