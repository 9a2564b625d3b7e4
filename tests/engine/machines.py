"""This machine, for tests that do not change it, and made-up file systems by which a kernel would answer."""

from functools import cache
from pathlib import Path

from optigpu.documents.result import Environment
from optigpu.hardware import probe


@cache
def here() -> Environment:
    """What `probe` finds, asked once: it starts git and the compiler each time."""
    return probe()


def tree(root: Path, **files: str) -> Path:
    """Files under `root`; "__" in a name means "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
