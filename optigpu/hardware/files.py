"""Reading of the kernel's small files."""

from pathlib import Path


def contents(path: Path) -> str:
    """The stripped text of a file; empty if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
