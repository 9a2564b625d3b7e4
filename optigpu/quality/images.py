"""Images for the comparison of classifiers, and the fp32 model's logits for them, the reference of a job."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.quality.divergence import Agreement
from optigpu.quality.reference import keep_array, kept_array
from optigpu.vocabulary import Frozen

IMAGES = 64
"""The number of images that are compared, rounded up to whole batches."""
IMAGES_RECIPE = "noise with the spectrum of photographs: amplitudes fall with the inverse of the frequency"
_NAME = "images"


class ImageSetting(Frozen):
    """What a reference is made for: `images` images of `shape` [channels, height, width] in batches of `batch_size`.

    `dataset_sha256` is of the folder that they are from; None: they are made from the seed.
    """

    model: str
    seed: int
    images: int
    batch_size: int
    shape: tuple[int, int, int]
    classes: int
    dataset_sha256: str | None = None


Classify = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Logits [batch, classes] of images [batch, channels, height, width]."""


@dataclass(frozen=True)
class ComparedImages:
    """Logits [images, classes] of the fp32 model and of a variant, and how far they are apart."""

    expected: NDArray[np.float32]
    found: NDArray[np.float32]
    agreement: Agreement


def write_image_reference(
    folder: Path, setting: ImageSetting, classify: Classify, given: Iterable[NDArray[np.float32]]
) -> ImageSetting:
    keep_array(folder, _NAME, setting, _logits(setting, classify, given))
    return setting


def compare_images(
    folder: Path, setting: ImageSetting, classify: Classify, given: Iterable[NDArray[np.float32]]
) -> ComparedImages:
    """Logits of `classify` and the reference's. Raises OptiGPUError without one for this setting, and for NaN or
    infinity."""
    differs = "The fp32 reference was made for other images or another model; submit this variant as a separate job."
    reference = np.load(kept_array(folder, _NAME, setting, differs), allow_pickle=False)
    agreement, logits = Agreement(), _logits(setting, classify, given)
    for expected, found in zip(reference, logits, strict=True):
        agreement.add(expected, found)
    return ComparedImages(reference, logits, agreement)


def _logits(
    setting: ImageSetting, classify: Classify, given: Iterable[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """[images, classes]; the last batch may be filled up with further images."""
    return np.concatenate([classify(images) for images in given])[: setting.images]


def batches(setting: ImageSetting) -> Iterator[NDArray[np.float32]]:
    """Generated images, [batch_size, channels, height, width] at a time: noise with the spectrum of photographs.

    Amplitudes fall with the inverse of the frequency (Field, Relations between the statistics of natural images and
    the response properties of cortical cells, 1987). Each channel of an image has mean 0 and deviation 1.
    """
    channels, height, width = setting.shape
    source = np.random.default_rng(setting.seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    falloff = np.divide(1.0, frequency, out=np.zeros_like(frequency), where=frequency > 0)

    def image() -> NDArray[np.float32]:
        noise = source.standard_normal((channels, height, width))
        made = np.fft.irfft2(np.fft.rfft2(noise) * falloff, s=(height, width))
        return np.asarray(made / made.std(axis=(1, 2), keepdims=True), np.float32)

    for _ in range(0, setting.images, setting.batch_size):
        yield np.stack([image() for _ in range(setting.batch_size)])
