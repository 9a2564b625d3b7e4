"""python -m optigpu.backends.ctranslate2.convert: writes one model with CTranslate2's own converter into a folder."""

import sys
from pathlib import Path

from optigpu.backends.converter_program import converter_parser, written

PARAMETERS = "parameters.txt"
"""Holds how many weights the model had."""


def main() -> int:
    """Converts a model to one of CTranslate2's types."""
    parser = converter_parser("optigpu.backends.ctranslate2.convert", __doc__, "folder")
    parser.add_argument("--type", required=True, help="CTranslate2's name, such as int8_float32")
    options = parser.parse_args()

    def write() -> None:
        convert(options.model, options.output, options.type, options.seed, options.threads)

    return written(write, options.output)


def convert(model: str, output: Path, kind: str, seed: int, threads: int) -> None:
    """Writes a model reference. A preset's weights are drawn from `seed`, as the torch backend does.

    Raises UnsupportedError for a model that cannot be had here, and one that CTranslate2 has no converter for.
    """
    from optigpu.backends.ctranslate2.written import write

    (output / PARAMETERS).write_text(f"{write(model, output, kind, seed, threads)}\n", "ascii")


if __name__ == "__main__":
    sys.exit(main())
