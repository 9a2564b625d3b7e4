"""A .tflite file in LiteRT: one tensor of images in, one of scores out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from optigpu.edge.tflite import Model, Tensor
from optigpu.vocabulary import UnsupportedError

QUANTIZED = ("int8", "uint8")
FLOAT = "float32"
Array = NDArray[np.generic]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TensorForm:
    """How a tensor holds numbers: real = scale * (stored - zero_point), or as they are in float32."""

    dtype: str
    scale: float = 1.0
    zero_point: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Raises UnsupportedError for other numbers, and for several scales."""
        if tensor.dtype == FLOAT:
            return cls(FLOAT)
        if tensor.dtype not in QUANTIZED or len(tensor.scales) != 1:
            raise UnsupportedError(
                f"The tensor {tensor.name} holds {tensor.dtype} with {len(tensor.scales)} scales; litert runs models "
                f"whose input and output are {FLOAT}, or {' or '.join(QUANTIZED)} with one scale."
            )
        return cls(tensor.dtype, tensor.scales[0], tensor.zero_points[0])

    def stored(self, values: Floats) -> Array:
        """Real numbers as the tensor holds them, rounded to the nearest; too large ones become the largest."""
        if self.dtype == FLOAT:
            return np.ascontiguousarray(values)
        limits = np.iinfo(self.dtype)
        levels = np.rint(values / self.scale) + self.zero_point
        held: Array = np.clip(levels, limits.min, limits.max).astype(self.dtype)
        return held

    def real(self, stored: Array) -> Floats:
        """The numbers that the tensor stands for."""
        if self.dtype == FLOAT:
            return np.asarray(stored, np.float32)
        levels = stored.astype(np.int32) - self.zero_point
        return np.asarray(levels * self.scale, np.float32)


class LiteRtModel:
    """The interpreter of a file, for one batch of images [batch, height, width, channels]."""

    def __init__(self, path: Path, model: Model, batch: int, threads: int) -> None:
        """Raises UnsupportedError if LiteRT cannot run the file, or not for such a batch."""
        shape = (batch, *model.inputs[0].shape[1:])
        try:
            self._interpreter = Interpreter(model_path=str(path), num_threads=threads)
            self._input = self._interpreter.get_input_details()[0]["index"]
            self._output = self._interpreter.get_output_details()[0]["index"]
            if shape != model.inputs[0].shape:
                self._interpreter.resize_tensor_input(self._input, shape, strict=False)
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedError(f"LiteRT cannot run {path.name} for {batch} images: {why}.") from error

    def fill(self, images: Array) -> None:
        """Copies the images, as the tensor holds them, into the interpreter."""
        self._interpreter.set_tensor(self._input, images)

    def run(self) -> Array:
        """One pass: the scores as they are stored, [batch, classes]."""
        self._interpreter.invoke()
        scores: Array = self._interpreter.get_tensor(self._output)
        return scores
