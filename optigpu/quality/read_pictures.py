"""Labelled images as a model takes them: read by the request that is timed, and by the meter that judges it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import ImageRuntime, PictureRuntime
from optigpu.documents.facts import PictureFacts
from optigpu.quality.pictures import Images, PictureFolder, class_indices, open_pictures, picture_batches
from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class ReadPictures:
    """A folder's images for one model; `labels` [images] are its classes."""

    labels: NDArray[np.int64]
    facts: PictureFacts
    _folder: PictureFolder
    _runtime: PictureRuntime

    def batches(self, size: int) -> Iterator[Images]:
        """All images once, `size` at a time, [size, channels, height, width]; the last batch is filled up.

        Raises UnsupportedError for a file that is no image.
        """
        return picture_batches(self._folder, size, self._runtime.processed)

    def endlessly(self, size: int) -> Iterator[Images]:
        """The batches again and again."""
        while True:
            yield from self.batches(size)


def read_pictures(runtime: ImageRuntime, name: str) -> ReadPictures:
    """The labelled images of a folder under the datasets folder.

    Raises UnsupportedError for a folder that cannot be read, for labels that are no classes of the model, and for an
    engine that reads none.
    """
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
