"""The directories of OptiGPU's files."""

import os
from pathlib import Path


def data_dir() -> Path:
    """OPTIGPU_DATA_DIR, else $XDG_DATA_HOME/optigpu, else ~/.local/share/optigpu. It may not exist yet."""
    chosen = os.environ.get("OPTIGPU_DATA_DIR")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "optigpu"


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/optigpu, else ~/.cache/optigpu: files that can be created again. It may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "optigpu"


def lock_dir() -> Path:
    """OPTIGPU_LOCK_DIR, else `locks` in the data directory: a job that measures on this host locks a file there."""
    chosen = os.environ.get("OPTIGPU_LOCK_DIR")
    return Path(chosen).expanduser() if chosen else data_dir() / "locks"
