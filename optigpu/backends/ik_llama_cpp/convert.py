"""python -m optigpu.backends.ik_llama_cpp.convert: quantizes one GGUF file with ik_llama.cpp, as llama_cpp.convert does
with llama.cpp."""

import argparse
import sys
from pathlib import Path

from optigpu.backends.llama_cpp.convert import add_quantizing, quantize


def main() -> int:
    """Quantizes a file of F16; the exit status is as llama_cpp.convert's."""
    from optigpu.backends.ik_llama_cpp.native import IkLlamaCpp

    parser = argparse.ArgumentParser(
        prog="python -m optigpu.backends.ik_llama_cpp.convert", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--threads", type=int, required=True)
    add_quantizing(parser)
    return quantize(parser.parse_args(), IkLlamaCpp())


if __name__ == "__main__":
    sys.exit(main())
