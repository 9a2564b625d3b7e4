"""python -m optigpu.backends.llama_cpp.convert: writes one GGUF file, or what it is quantized with."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from optigpu.backends.converted import converter_parser, written
from optigpu.backends.llama_cpp.gguf_facts import FILE_TYPES, WRITTEN, Form
from optigpu.backends.llama_cpp.library import Library, Quantizing
from optigpu.vocabulary import UnsupportedError

IMPORTANCE = "importance"
"""In the place of a type: how much each input of the matrices matters, as `gguf_tensors.py` writes it."""


def main() -> int:
    """Writes a model, or quantizes a file of F16 that was written before with llama.cpp."""
    parser = converter_parser("optigpu.backends.llama_cpp.convert", __doc__, "file", needs_model=False)
    parser.add_argument("--type", choices=(*WRITTEN, IMPORTANCE), help="of --model")
    add_quantizing(parser)
    options = parser.parse_args()
    if options.plain:
        from optigpu.backends.llama_cpp.native import LlamaCpp

        return quantize(options, LlamaCpp())
    return written(lambda: convert(options), options.output)


def add_quantizing(parser: argparse.ArgumentParser) -> None:
    """The arguments of `quantize`."""
    parser.add_argument("--plain", type=Path, help="an F16 file: quantized")
    parser.add_argument("--form", choices=FILE_TYPES, help="of --plain: the type")
    parser.add_argument(
        "--everywhere", action="store_true", help="the embedding and the head in that type too"
    )
    parser.add_argument("--importance", type=Path, help="of --plain, for types that need it")


def quantize(options: argparse.Namespace, library: Library) -> int:
    """Quantizes the F16 file; the exit status."""

    def work() -> None:
        form = Form(options.form, options.everywhere)
        importance = dict(np.load(options.importance)) if options.importance else None
        if not library.quantize(Quantizing(options.plain, options.output, form, options.threads, importance)):
            raise UnsupportedError(
                f"{library.title} could not quantize this model to {options.form}; choose another type."
            )

    return written(work, options.output)


def convert(options: argparse.Namespace) -> None:
    """Writes a model. A preset's weights are drawn from the seed, as the torch backend does.

    Raises UnsupportedError for a model that cannot be had here or cannot be written.
    """
    import torch

    from optigpu.backends.llama_cpp.gguf_tensors import write, write_importance
    from optigpu.models.loading.load import load_model, load_tokenizer
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(options.threads)
    reference = parse_reference(options.model)
    loaded = load_model(reference, device="cpu", dtype="float32", seed=options.seed)
    if options.type == IMPORTANCE:
        write_importance(loaded, options.output)
        return
    tokenizer = None
    with suppress(UnsupportedError):  # a model without one runs all the same
        tokenizer = load_tokenizer(reference)
    write(loaded, options.output, "float32" if options.type == "F32" else "float16", tokenizer)


if __name__ == "__main__":
    sys.exit(main())
