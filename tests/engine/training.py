"""Runtimes that train small models, and samples to train them with."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optigpu.backends.base import Order
from optigpu.backends.torch import TorchBackend
from optigpu.backends.torch.device import CpuClock
from optigpu.backends.torch.runtime import TorchTrainingRuntime
from optigpu.backends.torch.training_step import Trainer
from optigpu.backends.training import LabelledImages, Texts, TrainingBatch
from optigpu.documents.facts import ImageFacts
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.train_step import DrawnImages, DrawnTexts, TrainStep
from tests.engine.machines import here
from tests.engine.tiny_models import ignore

LLAMA, GPT2 = "preset:tiny-llama-test", "preset:tiny-gpt2-test"
RESNET, VIT = "preset:tiny-resnet-test", "preset:tiny-vit-test"
MOBILENET = "preset:tiny-mobilenet-test"


def trained(
    model: str, *stack: Technique, device: DeviceKind = DeviceKind.CPU, **workload: Any
) -> TorchTrainingRuntime:
    """What trains the model with the stack applied; `workload` are fields of TrainStep."""
    step = TrainStep(**workload)
    order = Order(
        model=model,
        stack=resolve(stack, step.kind),
        workload=step,
        device=device,
        seed=0,
        threads=1,
        folder=Path("unused"),
        environment=here(),
    )
    runtime = TorchBackend().prepare(order, ignore)
    assert isinstance(runtime, TorchTrainingRuntime)
    return runtime


def texts_for(
    runtime: TorchTrainingRuntime, documents: int = 4, length: int = 16, shortest: int = 6, seed: int = 0
) -> Texts:
    """Documents of different lengths in the language that the workload draws."""
    assert not isinstance(runtime.facts, ImageFacts)
    return DrawnTexts(runtime.facts, seed).batch(documents, length, shortest)


def images_for(runtime: TorchTrainingRuntime, images: int = 4, seed: int = 0) -> LabelledImages:
    """Images of the model's size."""
    assert isinstance(runtime.facts, ImageFacts)
    return DrawnImages(runtime.facts, runtime.facts.image_size, seed).batch(images)


def batch_for(runtime: TorchTrainingRuntime, samples: int = 4, seed: int = 0) -> Texts | LabelledImages:
    """Samples of what the model learns."""
    if isinstance(runtime.facts, ImageFacts):
        return images_for(runtime, samples, seed)
    return texts_for(runtime, samples, seed=seed)


def weights_of(runtime: TorchTrainingRuntime) -> list[Any]:
    """Copies of the weights that are trained, in the model's order."""
    return [weight.detach().clone() for weight in runtime.training.trainer.weights]


def losses_of(runtime: TorchTrainingRuntime, steps: int = 3) -> NDArray[np.float64]:
    """The losses of steps over always the same samples."""
    batch = batch_for(runtime)
    return np.array([runtime.step(batch).loss for _ in range(steps)])


def peak_bytes(runtime: TorchTrainingRuntime, batch: TrainingBatch) -> int:
    """Of a step, after the first one has made the optimizer's states."""
    runtime.step(batch)
    return bytes_of_step(runtime, batch)


def bytes_of_step(runtime: TorchTrainingRuntime, batch: TrainingBatch) -> int:
    """The peak of the next step."""
    found = runtime.peak_memory(lambda: runtime.step(batch)).allocated_bytes
    assert found is not None
    return found


def peak_of_texts(runtime: TorchTrainingRuntime, tokens: int) -> int:
    """Of a step with eight documents of so many tokens."""
    return peak_bytes(runtime, texts_for(runtime, documents=8, length=tokens, shortest=tokens))


def moved(trainer: Trainer, batch: TrainingBatch) -> float:
    """How far a step moves the weights together."""
    before = [weight.detach().clone() for weight in trainer.weights]
    trainer.step(batch, CpuClock())
    changes = [now.detach() - old for now, old in zip(trainer.weights, before, strict=True)]
    return float(torch.nn.utils.get_total_norm(changes))
