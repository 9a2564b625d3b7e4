"""Programs for ExecuTorch, written once and kept: their weights and their cache are float32."""

from pathlib import Path

from optigpu.backends import traced
from optigpu.backends.converted import Converter
from optigpu.backends.executorch import export
from optigpu.backends.fixed_shapes import FixedShapes

CONVERTER = Converter(
    engine="executorch",
    program=export.__name__,
    suffix=".pte",
    sources=(Path(export.__file__), Path(export.__file__).with_name("cached.py"), Path(traced.__file__)),
    libraries=("torch", "transformers", "executorch"),
)
PROGRAMS = FixedShapes(CONVERTER, "exporting the program")
