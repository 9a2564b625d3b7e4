"""What makes a model's inputs of pictures: its own processor, or the usual steps of classifiers of ImageNet."""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor

from optigpu.models.files import PROCESSOR, require_objects
from optigpu.models.loading.load import reading_of, source_of
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import UnsupportedError

SHORTER_SIDE = 256 / 224
"""The shorter side over the side of the square in its middle that is kept."""
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue, for pixels from 0 to 1: what classifiers of ImageNet are trained with."""
_SETTINGS = ("size", "crop_size", "resample", "do_center_crop", "rescale_factor", "image_mean", "image_std")

Images = NDArray[np.float32]
"""[1, channels, height, width]."""


class PictureProcessor(Protocol):
    """Makes a model's input of one picture; `description` says how."""

    description: str

    def __call__(self, picture: NDArray[np.uint8]) -> Images:
        """`picture`: [height, width, 3] in RGB."""


class OwnProcessor:
    """A transformers image processor."""

    def __init__(self, processor: Any) -> None:
        settings = {name: value for name, value in processor.to_dict().items() if name in _SETTINGS}
        self.description = f"{type(processor).__name__} {json.dumps(settings, sort_keys=True, default=str)}"
        self._processor = processor

    def __call__(self, picture: NDArray[np.uint8]) -> Images:
        made = self._processor(picture, return_tensors="np", input_data_format="channels_last")
        return np.asarray(made["pixel_values"], np.float32)


class UsualProcessor:
    """The shorter side to 256 / 224 of `side` pixels, the square in the middle, and ImageNet's mean and deviation."""

    def __init__(self, side: int, channels: int) -> None:
        if channels != 3:
            raise UnsupportedError(
                f"This model takes images of {channels} channels and has no preprocessor_config.json; put one beside "
                "it."
            )
        self._side, self._shorter = side, round(side * SHORTER_SIDE)
        self.description = (
            f"no processor with the model: shorter side to {self._shorter} pixels (bilinear), the {side} x {side} "
            f"pixels in the middle, mean {list(IMAGENET_MEAN)}, deviation {list(IMAGENET_DEVIATION)}"
        )

    def __call__(self, picture: NDArray[np.uint8]) -> Images:
        from PIL import Image

        height, width = picture.shape[:2]
        scale = self._shorter / min(height, width)
        size = (max(self._side, round(width * scale)), max(self._side, round(height * scale)))
        image = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
        left, top = (size[0] - self._side) // 2, (size[1] - self._side) // 2
        kept = np.asarray(image.crop((left, top, left + self._side, top + self._side)), np.float32) / 255
        scaled = (kept - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_DEVIATION)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], np.float32)


def load_processor(reference: ModelReference, side: int, channels: int) -> PictureProcessor:
    """The processor beside the model's files; where there is none, the usual one for squares of `side` pixels.

    Raises UnsupportedError where images of so many channels have no usual one, and for a damaged file.
    """
    if reference.kind == "path":
        require_objects(Path(source_of(reference)), (PROCESSOR,), reference)
    try:
        own = AutoImageProcessor.from_pretrained(source_of(reference), **reading_of(reference))
    except (OSError, ValueError):
        return UsualProcessor(side, channels)
    return OwnProcessor(own)
