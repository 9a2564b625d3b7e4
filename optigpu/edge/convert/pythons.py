"""The Python that a conversion runs in: one that has TensorFlow, which this one need not have."""

import sys
from importlib.util import find_spec
from pathlib import Path

from optigpu.vocabulary import UnsupportedError

NEEDED = ("tensorflow", "ai_edge_litert", "tflite_micro")
INSTALL = 'pip install -e ".[hardware]"'


def choose_python(named: Path | None) -> Path:
    """The named one, else this one. Raises UnsupportedError if this one lacks a package; it loads none of them."""
    if named is not None:
        return named
    if lacking := [name for name in NEEDED if find_spec(name) is None]:
        raise UnsupportedError(
            f"Converting needs TensorFlow, LiteRT and TFLite Micro, and this Python lacks {', '.join(lacking)}: "
            f"{INSTALL}, or name another Python with --python."
        )
    return Path(sys.executable)
