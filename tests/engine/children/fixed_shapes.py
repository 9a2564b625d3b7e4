"""A converter that writes what it was told, as JSON."""

import json
import sys

from optigpu.backends.converter_program import written
from optigpu.backends.fixed_shapes import fixed_shape_parser

options = fixed_shape_parser("tests.engine.children.fixed_shapes", __doc__, "file").parse_args()


def write() -> None:
    told = {name: value for name, value in vars(options).items() if name != "output"}
    options.output.write_text(json.dumps(told), "ascii")


sys.exit(written(write, options.output))
