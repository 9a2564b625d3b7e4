"""The inputs that a model is calibrated and compared with: images, an .npz file, or seeded random pictures."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .answers import RefusalError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif"})
MOST_HELD_OUT = 64
HELD_OUT_SHARE = 5
"""Of five samples one is held out."""
PIXELS = {"signed": (1 / 127.5, -1.0), "unit": (1 / 255, 0.0), "bytes": (1.0, 0.0)}
"""How a pixel of 0 to 255 becomes the network's input: factor and offset."""
PATCHES = 6

Inputs = NDArray[np.float32]


def npz_inputs(path: Path, shape: Sequence[int]) -> Inputs:
    """The inputs of an .npz file: its array `inputs`, or its only one; (samples, *shape)."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array, as np.save writes it")
            name = "inputs" if "inputs" in file.files else file.files[0]
            if name != "inputs" and len(file.files) > 1:
                raise RefusalError(
                    f"{path} has the arrays {', '.join(file.files)}; name one inputs.", wrong=True
                )
            found = file[name]
    except (OSError, ValueError, IndexError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RefusalError(f"{path} is not an .npz file with an array: {error}.", wrong=True) from None
    if found.shape[1:] != tuple(shape):
        raise RefusalError(
            f"{path}: {name} has the shape {list(found.shape)}, and the network takes "
            f"[samples, {', '.join(map(str, shape))}].",
            wrong=True,
        )
    if not np.issubdtype(found.dtype, np.number) or np.issubdtype(found.dtype, np.complexfloating):
        raise RefusalError(f"{path}: {name} holds {found.dtype}; save it as float32.", wrong=True)
    inputs: Inputs = found.astype(np.float32)
    if bad := int(np.count_nonzero(~np.isfinite(inputs))):
        raise RefusalError(
            f"{path}: {name} holds {bad} values that are NaN or infinite; remove them.", wrong=True
        )
    return inputs


def image_paths(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their names."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise RefusalError(
            f"{folder} has no images ({', '.join(sorted(SUFFIXES))}); name another folder.", wrong=True
        )
    return found


def random_inputs(count: int, shape: Sequence[int], pixels: str, random: np.random.Generator) -> Inputs:
    """Pictures of a few large patches with noise. Noise alone would look the same to a network each time."""
    factor, offset = PIXELS[pixels]
    if len(shape) != 3:
        return random.uniform(offset, offset + 255 * factor, (count, *shape)).astype(np.float32)
    height, width, channels = shape
    coarse = random.uniform(0, 255, (count, PATCHES, PATCHES, channels))
    rows, columns = np.arange(height) * PATCHES // height, np.arange(width) * PATCHES // width
    patches = coarse[:, rows][:, :, columns]
    noisy = np.clip(patches + random.normal(0, 16, patches.shape), 0, 255)
    return (noisy * factor + offset).astype(np.float32)


def require_different(inputs: Inputs) -> None:
    """Raises RefusalError where all samples are equal."""
    if len(inputs) > 1 and (inputs == inputs[0]).all():
        raise RefusalError(
            f"All {len(inputs)} samples are equal, so they say nothing of the data's range; give samples as the "
            "network will see them.",
            wrong=True,
        )


def split(inputs: Inputs, most: int, random: np.random.Generator) -> tuple[Inputs, Inputs]:
    """Those to calibrate with, at most so many, and those that are held out: a fifth, 1 to 64."""
    if len(inputs) < 2:
        raise RefusalError(
            "Calibration needs at least 2 samples, one of which is held out; give more, usually 100.",
            wrong=True,
        )
    order = random.permutation(len(inputs))
    held_out = min(MOST_HELD_OUT, max(1, len(inputs) // HELD_OUT_SHARE))
    return inputs[order[held_out:][:most]], inputs[order[:held_out]]


def chosen(count: int, most: int, random: np.random.Generator) -> list[int]:
    """Which of so many files are read: enough to calibrate with `most` and to hold some out."""
    wanted = min(count, most + min(MOST_HELD_OUT, max(1, most // (HELD_OUT_SHARE - 1))))
    return sorted(int(each) for each in random.permutation(count)[:wanted])
