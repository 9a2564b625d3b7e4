"""A converter that writes what it was told, as JSON."""

import json
import sys

from optigpu.backends.converted import converter_parser, written

options = converter_parser("tests.engine.children.told", __doc__, "file").parse_args()


def write() -> None:
    told = {name: value for name, value in vars(options).items() if name != "output"}
    options.output.write_text(json.dumps(told), "ascii")


sys.exit(written(write, options.output))
