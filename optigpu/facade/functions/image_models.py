"""The image classifier that is measured where the caller names none."""

from collections.abc import Callable

import torch

from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference

ModelFn = Callable[[], torch.nn.Module]
"""Makes a model, as torchvision's `models.resnet50` does."""
IMAGE_MODEL = "preset:resnet-50"


def resnet_50() -> torch.nn.Module:
    """preset:resnet-50 with random weights, on the CPU in float32, ready to be trained."""
    model: torch.nn.Module = load_image_model(parse_reference(IMAGE_MODEL), device="cpu", dtype="float32")
    return model.requires_grad_(True)
