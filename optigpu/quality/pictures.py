"""Images for the comparison of classifiers with the fp32 model's logits for them: noise, or labelled ones in a folder
under the datasets folder.

A folder has one folder for each class, or a `labels.csv` with the columns `file` and `label`.
"""

import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import ImageRuntime, Images, PictureRuntime, Pixels
from optigpu.documents.facts import PictureFacts
from optigpu.quality.divergence import Agreement
from optigpu.quality.reference import keep_array, kept_array
from optigpu.quality.text import DATASETS_DIR, check_inside
from optigpu.vocabulary import Frozen, UnsupportedError

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


LABELS = "labels.csv"
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")


@dataclass(frozen=True)
class Picture:
    path: Path
    label: str


@dataclass(frozen=True)
class PictureFolder:
    """The images of a folder; `sha256` is of the names, labels and contents of all files."""

    name: str
    pictures: tuple[Picture, ...]
    sha256: str


def open_pictures(name: str) -> PictureFolder:
    """The images of a folder under the datasets folder, in the order of their names.

    Raises UnsupportedError without Pillow, and for a folder that is not there, leads elsewhere or has no such image.
    """
    if find_spec("PIL") is None:
        raise UnsupportedError(
            "Images are read by Pillow, which is not installed; install it with: pip install pillow"
        )
    root = os.environ.get(DATASETS_DIR)
    if not root:
        raise UnsupportedError(
            f"images {name} are under the datasets folder; set {DATASETS_DIR} for the worker."
        )
    folder = (Path(root) / name).resolve()
    if not folder.is_relative_to(Path(root).resolve()):
        raise UnsupportedError(f"{name} is outside of {DATASETS_DIR}; move the folder into it.")
    if not folder.is_dir():
        raise UnsupportedError(f"There is no folder {name} under {DATASETS_DIR}; put the images there.")
    found = tuple(_listed(folder) if (folder / LABELS).is_file() else _by_folder(folder))
    for each in found:
        if not each.path.resolve().is_relative_to(folder):
            raise UnsupportedError(
                f"{each.path.name} leads out of the folder of images; put the file itself there."
            )
    if not found:
        raise UnsupportedError(
            f"{name} holds no labelled image ({', '.join(SUFFIXES)}); make one folder for each class, or write "
            f"{LABELS}."
        )
    digest = hashlib.sha256()
    for each in found:
        content = hashlib.sha256(each.path.read_bytes()).hexdigest()
        digest.update(f"{each.path.relative_to(folder).as_posix()}\0{each.label}\0{content}\n".encode())
    return PictureFolder(name, found, digest.hexdigest())


def check_folder(name: str) -> str:
    """The name itself. Raises ValueError if it leads out of the datasets folder."""
    check_inside(name, f"{name!r} must be a folder")
    return name


def class_indices(labels: Sequence[str], classes: Sequence[str]) -> tuple[NDArray[np.int64], str]:
    """The model's class of each label, and how labels were read.

    Labels are names of `classes` (some are synonyms with commas between) or their numbers; as many as there are classes
    may be other words, in alphabetical order. Raises UnsupportedError for a label that is none of them.
    """
    known = {
        word.strip().lower(): index for index, name in enumerate(classes) for word in [name, *name.split(",")]
    }
    if all(label.lower() in known for label in labels):
        return np.array([known[label.lower()] for label in labels]), "names of the model's classes"
    distinct = sorted(set(labels))
    if all(label.isdecimal() and int(label) < len(classes) for label in distinct):
        return np.array([int(label) for label in labels]), "numbers of the model's classes"
    if len(distinct) == len(classes):
        indices = [distinct.index(label) for label in labels]
        return np.array(indices), "the model's classes in alphabetical order"
    odd = next(label for label in distinct if label.lower() not in known)
    raise UnsupportedError(
        f"The label {odd!r} is no class of this model; its {len(classes)} classes are {', '.join(classes[:5])}, ... "
        "Name folders by the model's classes, or by their numbers from 0."
    )


def _pixels(path: Path) -> Pixels:
    from PIL import Image  # what only this workload needs

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise UnsupportedError(f"{path.name} cannot be read as an image ({error}); remove it.") from error


def _by_folder(folder: Path) -> Iterator[Picture]:
    for inner in sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")):
        for path in sorted(inner.iterdir()):
            if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
                yield Picture(path, inner.name)


def _listed(folder: Path) -> Iterator[Picture]:
    text = io.StringIO((folder / LABELS).read_text("utf-8-sig"), newline="")
    rows = csv.DictReader(text)
    if not {"file", "label"} <= set(rows.fieldnames or ()):
        raise UnsupportedError(
            f"{LABELS} needs a first line with the columns file and label; write: file,label"
        )
    for row in rows:
        path = folder / row["file"]
        if not path.is_file():
            raise UnsupportedError(f"{LABELS} names {row['file']}, and there is no such file beside it.")
        yield Picture(path, row["label"].strip())


@dataclass(frozen=True)
class ReadPictures:
    """A folder's images for one model; `labels` [images] are its classes."""

    labels: NDArray[np.int64]
    facts: PictureFacts
    _folder: PictureFolder
    _runtime: PictureRuntime

    def batches(self, size: int) -> Iterator[Images]:
        """All once, the last batch filled up with its first image. Raises UnsupportedError for a file that is no
        image."""
        pictures = self._folder.pictures
        for start in range(0, len(pictures), size):
            batch = [_pixels(each.path) for each in pictures[start : start + size]]
            yield self._runtime.processed(batch + [batch[0]] * (size - len(batch)))


def read_pictures(runtime: ImageRuntime, name: str) -> ReadPictures:
    """As `open_pictures`. Raises UnsupportedError also for labels that are no classes and for other engines."""
    if not isinstance(runtime, PictureRuntime):
        raise UnsupportedError("This engine reads no images; leave images out, or ask for the backend torch.")
    folder = open_pictures(name)
    labels, how = class_indices([each.label for each in folder.pictures], runtime.class_names())
    facts = PictureFacts(
        folder=name,
        sha256=folder.sha256,
        images=len(folder.pictures),
        labels=how,
        preprocessing=runtime.preprocessing(),
    )
    return ReadPictures(labels, facts, folder, runtime)
