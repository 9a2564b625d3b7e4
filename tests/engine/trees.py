"""Made-up file systems, for what reads the files by which a kernel answers."""

from pathlib import Path


def tree(root: Path, **files: str) -> Path:
    """Files under `root`; "__" in a name means "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
