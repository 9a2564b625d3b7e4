"""The sizes of the CPU's caches."""

from pathlib import Path

_ROOT = Path("/")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_cache_bytes(root: Path = _ROOT) -> int | None:
    """Bytes of the first CPU's largest cache; None if the kernel does not report it.

    `root` is the root of the file system, so that a test can hand in another.
    """
    sizes = (_bytes(path.read_text()) for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
    return max((size for size in sizes if size), default=None)


def _bytes(text: str) -> int | None:
    """The kernel writes "491520K"."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    return int(number) * _UNITS[unit] if number.isdigit() and unit in _UNITS else None
