"""python -m optigpu.backends.onnxruntime.convert: writes one model as a folder with an ONNX graph."""

import sys
from pathlib import Path

from optigpu.backends.converter_program import converter_parser, written
from optigpu.backends.onnxruntime.formats import DATA, MODEL, Contents, Format, file_sizes


def main() -> int:
    """Writes a decoder in a format, or a classifier for images of a size."""
    parser = converter_parser("optigpu.backends.onnxruntime.convert", __doc__, "folder")
    parser.add_argument("--format", help="of a decoder's matrices, by its name")
    parser.add_argument("--image-size", type=int, help="the side in pixels of the images of a classifier")
    parser.add_argument(
        "--calibration-images", type=int, help="quantizes a classifier with scales from so many"
    )
    options = parser.parse_args()

    def write() -> None:
        import torch

        torch.set_num_threads(options.threads)
        options.output.mkdir()
        if options.format:
            contents = convert_decoder(
                options.model, options.seed, Format.parse(options.format), options.output
            )
        else:
            size, images = options.image_size, options.calibration_images
            contents = convert_classifier(options.model, options.seed, size, images, options.output)
        contents.write(options.output)

    return written(write, options.output)


def convert_decoder(model: str, seed: int, form: Format, folder: Path) -> Contents:
    """Raises UnsupportedError for a model that cannot be had here or cannot be written."""
    from optigpu.backends.onnxruntime.decoder_graph import write_decoder
    from optigpu.backends.onnxruntime.graph import GraphWriter, totals
    from optigpu.documents.shapes import Footprint
    from optigpu.models.loading.load import count_weights, load_model, loaded_facts
    from optigpu.models.reference import parse_reference

    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    with (folder / DATA).open("wb") as data:
        graph = GraphWriter(data)
        write_decoder(loaded, graph, form)
    graph.save(folder / MODEL)
    found = totals(graph.constants)
    facts = loaded_facts(loaded)
    return Contents(
        footprint=Footprint(facts, found.streamed_bytes, found.row_bytes, form.product_dtypes),
        parameters=count_weights(loaded),
        packed=8 * found.packed_bytes // form.bits,
        bytes=found.bytes,
        tensor_types=found.types,
        files=file_sizes(folder),
    )


def convert_classifier(model: str, seed: int, size: int, images: int | None, folder: Path) -> Contents:
    """Raises UnsupportedError for a model that cannot be had here or cannot be exported."""
    from dataclasses import replace

    from optigpu.backends.onnxruntime.classifier_graph import constants_of, write_classifier
    from optigpu.models.loading.footprint import image_footprint_of
    from optigpu.models.loading.load import count_weights, load_image_model, loaded_image_facts
    from optigpu.models.reference import parse_reference

    loaded = load_image_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    facts = loaded_image_facts(loaded)
    shape = (facts.channels, size, size)
    write_classifier(loaded, folder / MODEL, shape)
    if images:
        from optigpu.backends.onnxruntime.static_int8 import quantize

        quantize(folder / MODEL, shape, images)
    found = constants_of(folder / MODEL)
    footprint = image_footprint_of(loaded, facts, shape)
    return Contents(
        footprint=replace(
            footprint, streamed_bytes=found.streamed_bytes, product_dtypes=("int8",) if images else ()
        ),
        parameters=count_weights(loaded),
        packed=found.packed_bytes,
        bytes=found.bytes,
        tensor_types=found.types,
        files=file_sizes(folder),
    )


if __name__ == "__main__":
    sys.exit(main())
