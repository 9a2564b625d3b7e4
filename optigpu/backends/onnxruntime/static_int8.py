"""A classifier's graph with int8 weights and uint8 activations, by ONNX Runtime's own quantizer."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import (
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)

_SEED = 20
"""Of the images that the scales come from: none that a workload draws."""


class _Drawn:
    """Random normal images, one at a time: a CalibrationDataReader."""

    def __init__(self, count: int, shape: tuple[int, int, int]) -> None:
        source = np.random.default_rng(_SEED)
        self._images = (source.standard_normal((1, *shape)).astype(np.float32) for _ in range(count))

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """The next one by the name of the graph's input; None after the last."""
        image = next(self._images, None)
        return None if image is None else {"images": image}


def quantize(path: Path, shape: tuple[int, int, int], images: int) -> None:
    """Replaces the graph by a quantized one; the scales of activations are the extremes over so many `images`."""
    plain = path.with_suffix(".plain")
    quant_pre_process(str(path), str(plain), skip_symbolic_shape=True)
    quantize_static(
        str(plain),
        str(path),
        _Drawn(images, shape),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    plain.unlink()
