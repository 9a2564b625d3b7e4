"""Reading the small files by which a kernel answers."""

from pathlib import Path


def contents(path: Path) -> str:
    """The text of a file without the blanks around it; empty where it is missing or may not be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
