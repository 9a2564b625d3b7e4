"""An image classifier of transformers as an ONNX graph, by torch's own exporter."""

import warnings
from collections import Counter
from pathlib import Path

import onnx
import torch
from transformers import PreTrainedModel

from optigpu.backends.onnxruntime.graph import PACKED, Written
from optigpu.vocabulary import UnsupportedError

_OPSET = 17


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
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the tracer's, of Python that depends on shapes: those are fixed here
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


def constants_of(path: Path) -> Written:
    """The constants of a graph, all of which a pass reads."""
    tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    sizes = [
        onnx.helper.tensor_dtype_to_np_dtype(each.data_type).itemsize * _elements(each) for each in tensors
    ]
    types = [str(onnx.helper.tensor_dtype_to_np_dtype(each.data_type)) for each in tensors]
    packed = [size for size, kind in zip(sizes, types, strict=True) if kind in PACKED]
    return Written(sum(sizes), sum(sizes), 0, dict(Counter(types)), sum(packed))


def _elements(tensor: onnx.TensorProto) -> int:
    count = 1
    for size in tensor.dims:
        count *= size
    return count
