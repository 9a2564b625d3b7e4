"""A tiny image classifier that learned something in a second, saved as a `path:` model, and runtimes of passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import PassModel
from optigpu.backends.torch.runtime import TorchPassRuntime
from optigpu.job.spec import resolve
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Task
from tests.engine.tiny_models import ignore

FAMILIES = ("resnet", "mobilenet", "vit")
SIDE = 32


def image_runtime(model: str, *stack: Technique) -> PassModel:
    """The classifier on this CPU with the stack applied."""
    return PassModel(Task.IMAGES, model, resolve(stack, "classify"), DeviceKind.CPU, seed=0, progress=ignore)


def prefill_runtime(model: str, *stack: Technique) -> PassModel:
    """The decoder on this CPU with the stack applied, for passes over prompts."""
    return PassModel(Task.PREFILL, model, resolve(stack, "prefill"), DeviceKind.CPU, seed=0, progress=ignore)


def asked_to_pass(model: PassModel, folder: Path = Path("unused")) -> Any:
    """What workloads and meters ask of such a model: an ImageRuntime or a PromptRuntime."""
    return TorchPassRuntime(model, folder)


@pytest.fixture(scope="module")
def squares(models_dir: Path) -> Path:
    """The folder of `path:squares`."""
    folder = models_dir / "squares"
    _trained().save_pretrained(folder)
    return folder


def _trained() -> Any:
    """A ResNet that tells, at least in part, which quarter of an image is brighter; six of its classes are unused."""
    model = load_image_model(parse_reference("preset:tiny-resnet-test"), device="cpu", dtype="float32")
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = torch.Generator().manual_seed(0)
    for _ in range(60):
        images = torch.randn(16, 3, SIDE, SIDE, generator=source)
        labels = torch.randint(4, (16,), generator=source)
        for image, label in zip(images, labels.tolist(), strict=True):
            half = SIDE // 2
            image[:, half * (label // 2) :, half * (label % 2) :][:, :half, :half] += 1
        optimizer.zero_grad()
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()
