"""python -m optigpu.backends.onnxruntime.convert: writes one model as a folder with an ONNX graph."""

import argparse
import sys
import warnings
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from optigpu.backends.converted import converter_parser, written
from optigpu.backends.onnxruntime import DATA, MODEL, Contents, Format, file_sizes
from optigpu.backends.onnxruntime.graphs import PACKED, GraphWriter, Written, write_decoder
from optigpu.documents.facts import Footprint
from optigpu.models.loading.footprint import counted, image_footprint_of
from optigpu.models.loading.load import (
    ClassLogits,
    count_weights,
    load_image_model,
    load_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError

_OPSET = 17
_SEED = 20
"""Of the images that the scales come from: none that a workload draws."""


def write_classifier(model: PreTrainedModel, path: Path, shape: tuple[int, int, int]) -> None:
    """Writes the graph for images of `shape`, [channels, height, width], in batches of any size.

    Batch norms become part of the convolutions before them. Raises UnsupportedError where torch cannot export it.
    """
    with warnings.catch_warnings(
        action="ignore"
    ):  # the tracer's, of Python that depends on shapes, fixed here
        try:
            torch.onnx.export(
                ClassLogits(model).eval(),
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


def main() -> int:
    """Writes a decoder in a format, or a classifier for images of a size."""
    parser = converter_parser("optigpu.backends.onnxruntime.convert", __doc__, "folder")
    parser.add_argument("--format", help="of a decoder's matrices, by its name")
    parser.add_argument("--image-size", type=int, help="the side in pixels of the images of a classifier")
    parser.add_argument(
        "--calibration-images", type=int, help="quantizes a classifier with scales from so many; 0: not"
    )
    options = parser.parse_args()

    def write() -> None:
        torch.set_num_threads(options.threads)
        options.output.mkdir()
        contents = convert_decoder(options) if options.format else convert_classifier(options)
        contents.write(options.output)

    return written(write, options.output)


def convert_decoder(options: argparse.Namespace) -> Contents:
    """Raises UnsupportedError for a model that cannot be had here or cannot be written."""
    folder, form = options.output, Format.parse(options.format)
    loaded = load_model(parse_reference(options.model), device="cpu", dtype="float32", seed=options.seed)
    with (folder / DATA).open("wb") as data:
        graph = GraphWriter(data)
        write_decoder(loaded, graph, form)
    graph.save(folder / MODEL)
    found, facts = graph.written, counted(loaded_facts(loaded), loaded.config)
    return Contents(
        footprint=Footprint(facts, found.streamed_bytes, found.row_bytes, form.product_dtypes),
        parameters=count_weights(loaded),
        packed=8 * found.packed_bytes // form.bits,
        bytes=found.bytes,
        tensor_types=found.types,
        files=file_sizes(folder),
    )


def convert_classifier(options: argparse.Namespace) -> Contents:
    """Raises UnsupportedError for a model that cannot be had here or cannot be exported."""
    model, size, images = options.model, options.image_size, options.calibration_images
    loaded = load_image_model(parse_reference(model), device="cpu", dtype="float32", seed=options.seed)
    facts, path = loaded_image_facts(loaded), options.output / MODEL
    shape = (facts.channels, size, size)
    write_classifier(loaded, path, shape)
    if images:
        quantize(path, shape, images)
    # The constants of a graph, all of which a pass reads.
    tensors = onnx.load(str(path), load_external_data=False).graph.initializer
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(each.data_type) for each in tensors]
    sizes = [dtype.itemsize * prod(each.dims) for dtype, each in zip(dtypes, tensors, strict=True)]
    packed = [size for size, dtype in zip(sizes, dtypes, strict=True) if str(dtype) in PACKED]
    found = Written(sum(sizes), sum(sizes), 0, Counter(map(str, dtypes)), sum(packed))
    products = ("int8",) if images else ()
    footprint = image_footprint_of(loaded, facts, shape)
    return Contents(
        footprint=replace(footprint, streamed_bytes=found.streamed_bytes, product_dtypes=products),
        parameters=count_weights(loaded),
        packed=found.packed_bytes,
        bytes=found.bytes,
        tensor_types=found.types,
        files=file_sizes(options.output),
    )


if __name__ == "__main__":
    sys.exit(main())
