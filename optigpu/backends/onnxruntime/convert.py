"""python -m optigpu.backends.onnxruntime.convert: writes one model as a folder with an ONNX graph."""

import argparse
import sys
from dataclasses import replace

import torch

from optigpu.backends.converter_program import converter_parser, written
from optigpu.backends.onnxruntime.classifier_graph import constants_of, quantize, write_classifier
from optigpu.backends.onnxruntime.decoder_graph import write_decoder
from optigpu.backends.onnxruntime.formats import DATA, MODEL, Contents, Format, file_sizes
from optigpu.backends.onnxruntime.graph import GraphWriter
from optigpu.documents.facts import Footprint
from optigpu.models.loading.footprint import image_footprint_of
from optigpu.models.loading.load import (
    count_weights,
    load_image_model,
    load_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.reference import parse_reference


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
    found = graph.written
    return Contents(
        footprint=Footprint(loaded_facts(loaded), found.streamed_bytes, found.row_bytes, form.product_dtypes),
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
    found = constants_of(path)
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
