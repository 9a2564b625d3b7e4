"""An image classifier of transformers as an ONNX graph, by torch's exporter; in int8 by ONNX Runtime's own tool."""

import warnings
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from optigpu.backends.onnxruntime.graph import PACKED, Written
from optigpu.vocabulary import UnsupportedError

_OPSET = 17
_SEED = 20
"""Of the images that the scales come from: none that a workload draws."""


class _Logits(torch.nn.Module):
    """Images in, logits out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(pixel_values=images).logits
        return logits


def write_classifier(model: PreTrainedModel, path: Path, shape: tuple[int, int, int]) -> None:
    """Writes the graph for images of `shape`, [channels, height, width], in batches of any size.

    Batch norms become part of the convolutions before them. Raises UnsupportedError where torch cannot export it.
    """
    with warnings.catch_warnings(
        action="ignore"
    ):  # the tracer's, of Python that depends on shapes, fixed here
        try:
            torch.onnx.export(
                _Logits(model).eval(),
                (torch.zeros(2, *shape),),
                str(path),
                input_names=["images"],
                output_names=["logits"],
                dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
                opset_version=_OPSET,
                dynamo=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise UnsupportedError(
                f"torch cannot export this classifier as ONNX ({str(error).strip().splitlines()[0]}); ask for the "
                "backend torch."
            ) from error


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
    """Replaces the graph by one with int8 weights and uint8 activations, whose scales cover so many random images."""
    from onnxruntime.quantization import QuantFormat, QuantType, quant_pre_process, quantize_static

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


def constants_of(path: Path) -> Written:
    """The constants of a graph, all of which a pass reads."""
    tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(each.data_type) for each in tensors]
    sizes = [dtype.itemsize * prod(each.dims) for dtype, each in zip(dtypes, tensors, strict=True)]
    packed = [size for size, dtype in zip(sizes, dtypes, strict=True) if str(dtype) in PACKED]
    return Written(sum(sizes), sum(sizes), 0, Counter(map(str, dtypes)), sum(packed))
