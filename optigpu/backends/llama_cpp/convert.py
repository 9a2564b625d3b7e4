"""python -m optigpu.backends.llama_cpp.convert: writes one GGUF file.

A process of its own, so that the measuring process loads no torch and its peak memory is llama.cpp's alone. The exit
status is 0 when the file is written, REFUSED when the model cannot be written (the last line of stdout says why).
"""

import argparse
import ctypes
import sys
from pathlib import Path

from optigpu.backends.llama_cpp.file_types import FileType
from optigpu.vocabulary import UnsupportedError

REFUSED = 3


def main() -> int:
    """Converts a model, or quantizes a file of float16 that was converted before."""
    parser = argparse.ArgumentParser(prog="python -m optigpu.backends.llama_cpp.convert", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--type", type=FileType, choices=tuple(FileType), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", help="a reference to a preset or a bundled model: written as F32 or F16")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's random weights")
    parser.add_argument("--plain", type=Path, help="an F16 file: quantized to the type")
    options = parser.parse_args()
    try:
        if options.plain:
            quantize(options.plain, options.output, options.type, options.threads)
        else:
            convert(options.model, options.output, options.type, options.seed, options.threads)
    except UnsupportedError as error:
        print(error)
        return REFUSED
    return 0


def convert(model: str, output: Path, file_type: FileType, seed: int, threads: int) -> None:
    """Writes a model reference as F32 or F16. A preset's weights are drawn from `seed`, as the torch backend does.

    Raises UnsupportedError for a model that cannot be had here or cannot be written.
    """
    import torch

    from optigpu.backends.llama_cpp.gguf_file import write
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    write(loaded, output, "float32" if file_type is FileType.F32 else "float16")


def quantize(plain: Path, output: Path, file_type: FileType, threads: int) -> None:
    """Writes the F16 file `plain` to `output` as llama.cpp quantizes it without an importance matrix.

    Raises UnsupportedError when it cannot.
    """
    import llama_cpp

    from optigpu.backends.llama_cpp.log import print_errors_only

    print_errors_only()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type.value}")
    parameters.nthread = threads
    names = str(plain).encode(), str(output).encode()
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise UnsupportedError(f"llama.cpp could not quantize this model to {file_type.value}.")


if __name__ == "__main__":
    sys.exit(main())
