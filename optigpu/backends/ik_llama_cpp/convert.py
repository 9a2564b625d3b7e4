"""python -m optigpu.backends.ik_llama_cpp.convert: quantizes one GGUF file with ik_llama.cpp, as llama_cpp.convert does
with llama.cpp."""

import sys

from optigpu.backends.converter_program import converter_parser
from optigpu.backends.llama_cpp.convert import add_quantizing, quantize


def main() -> int:
    """Quantizes a file of F16; the exit status is as llama_cpp.convert's."""
    from optigpu.backends.ik_llama_cpp.native import IkLlamaCpp

    parser = converter_parser("optigpu.backends.ik_llama_cpp.convert", __doc__, "file", needs_model=False)
    add_quantizing(parser)
    return quantize(parser.parse_args(), IkLlamaCpp())


if __name__ == "__main__":
    sys.exit(main())
