"""Cache folders of a test's own."""

from pathlib import Path

from optigpu.paths import cache_dir

OPERATORS, PEAKS, CONVERTED, BUILDS = "ops", "peaks", "converted", "builds"
"""What takes seconds to make again, and is the same for every test. A file is named by all that it is made of."""


def cache_with(parent: Path, *shared: str) -> Path:
    """An OptiGPU cache folder with nothing but what is shared with this user's; its parent is XDG_CACHE_HOME."""
    folder = parent / "cache" / "optigpu"
    folder.mkdir(parents=True)
    for name in shared:
        (cache_dir() / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(cache_dir() / name)
    return folder
