"""The models that lie on this machine: folders under OPTIGPU_MODELS_DIR, and the cache of the hub. Loads no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from optigpu.vocabulary import UnsupportedError

MODELS_DIR = "OPTIGPU_MODELS_DIR"
"""The environment variable that names the directory of `path:` references."""
DEEPEST = 4
"""How many folders below that directory a model is looked for."""
MOST_FOLDERS = 1000
"""How many folders of one depth are looked at."""
_CONFIGURATION = "config.json"


def model_directory(name: str) -> Path:
    """The directory of a `path:` reference; the target of a link must be under the model directory as well.

    Raises UnsupportedError if there is none.
    """
    root = _root()
    if root is None:
        raise UnsupportedError(f"path:{name} needs a model directory; set {MODELS_DIR} for the worker.")
    directory = (root / name).resolve()
    if not directory.is_relative_to(root):
        raise UnsupportedError(f"path:{name} leads out of the model directory; put the model under it.")
    if not directory.is_dir():
        raise UnsupportedError(f"There is no directory path:{name} under the model directory of this worker.")
    return directory


def held_models() -> tuple[str, ...]:
    """References to the models that can be loaded here without a network, besides presets and bundled models.

    Of the hub's cache only where nothing may be downloaded: elsewhere every model of the hub can be loaded.
    """
    return (*_folders(), *sorted(() if may_download() else _cached()))


def may_download() -> bool:
    """Whether models may come from the hub. HF_HUB_OFFLINE forbids it, with the values that the hub's library knows."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE")


def _root() -> Path | None:
    chosen = os.environ.get(MODELS_DIR)
    return Path(chosen).resolve() if chosen else None


def _folders() -> Iterator[str]:
    """The folders with a configuration that this process can read, as references."""
    root = _root()
    if root is None:
        return
    level = [root]
    for _ in range(DEEPEST + 1):
        for folder in level:
            if os.access(folder / _CONFIGURATION, os.R_OK):
                yield f"path:{folder.relative_to(root)}"
        level = [inner for folder in level for inner in _inner(folder, root)][:MOST_FOLDERS]


def _inner(folder: Path, root: Path) -> list[Path]:
    """The folders within one, without hidden ones, and without links out of `root`, which no reference may follow."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    shown = (folder / name for name in names if name.isprintable() and not name.startswith("."))
    return [
        path for path in shown if os.path.isdir(path) and Path(os.path.realpath(path)).is_relative_to(root)
    ]


def _cached() -> Iterator[str]:
    """What the hub's cache can load: by name if it is the default branch, by branch or tag, and by commit."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # only offline workers need it

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in repositories:
        for revision in repository.revisions if repository.repo_type == "model" else ():
            files = {file.file_name for file in revision.files}
            if _CONFIGURATION in files and any(name.endswith(".safetensors") for name in files):
                name = f"hub:{repository.repo_id}"
                if "main" in revision.refs:
                    yield name
                yield from (f"{name}@{known}" for known in (*revision.refs, revision.commit_hash))
