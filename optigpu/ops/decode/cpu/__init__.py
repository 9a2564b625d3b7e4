"""The operator of a CPU. Loads no torch, because techniques ask whether the operator is built."""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
SOURCES = (
    _FOLDER / "decode.cpp",
    *sorted(_FOLDER.glob("*.h")),
    _FOLDER.parents[1] / "bfloat16.h",
    _FOLDER.parents[1] / "vector_math.h",
)
"""decode.cpp and what it includes."""
