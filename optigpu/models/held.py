"""The models that lie on this machine: under OPTIGPU_MODELS_DIR, and in the cache of the hub. Loads no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from optigpu.models.reference import TRAINED, ModelReference
from optigpu.paths import data_dir, expanded
from optigpu.vocabulary import UnsupportedError

MODELS_DIR = "OPTIGPU_MODELS_DIR"
"""The environment variable that names the directory of `path:` references."""
DEEPEST = 4
"""How many folders below that directory a model is looked for."""
MOST_FOLDERS = 1000
"""How many folders of one depth are looked at."""
CONFIGURATION = "config.json"
TFLITE, GGUF, KERAS = ".tflite", ".gguf", ".keras"
FILES = {TFLITE: "litert", GGUF: "llama_cpp", KERAS: "tensorflow"}
"""A backend of each kind of file that a reference may name, as path:edge/model.tflite. ik_llama_cpp runs GGUF too, and
torch what transformers reads of it."""


def models_dir() -> Path:
    """OPTIGPU_MODELS_DIR, else `models` in the data directory. It may not exist. Raises UnsupportedError where neither
    can be had."""
    chosen = os.environ.get(MODELS_DIR)
    return expanded(chosen, MODELS_DIR) if chosen else data_dir() / "models"


def model_directory(name: str) -> Path:
    """The directory of a `path:` reference. Raises UnsupportedError if there is none, or if a link leads out: its own,
    or one of a file in it."""
    directory = under_root(name)
    backend = FILES.get(Path(name).suffix)
    if backend and os.path.isfile(directory):
        raise UnsupportedError(
            f"path:{name} is a file for the backend {backend}; this one reads directories."
        )
    if not os.path.isdir(directory):
        brought = f"; `optigpu models get {name}` brings it" if name in TRAINED else ""
        raise UnsupportedError(
            f"There is no directory path:{name} under the model directory ({MODELS_DIR}){brought}."
        )
    for file in sorted(directory.iterdir()) if os.access(directory, os.R_OK) else ():
        if file.is_symlink():
            under_root(f"{name}/{file.name}")
    return directory


def gguf_file(reference: ModelReference) -> Path | None:
    """The GGUF file that a reference names, or None. Raises UnsupportedError as `model_file` does."""
    is_one = reference.kind == "path" and reference.name.endswith(GGUF)
    return model_file(reference.name) if is_one else None


def model_file(name: str) -> Path:
    """The file of a `path:` reference. Raises UnsupportedError as `model_directory` does."""
    file = under_root(name)
    if not os.path.isfile(file):
        raise UnsupportedError(f"There is no file path:{name} under the model directory ({MODELS_DIR}).")
    return file


def require_held(reference: ModelReference) -> None:
    """Raises UnsupportedError where a `path:` reference names nothing under the model directory."""
    if reference.kind != "path":
        return
    if Path(reference.name).suffix in FILES:
        model_file(reference.name)
    else:
        model_directory(reference.name)


def under_root(name: str) -> Path:
    """What a name within the model directory stands for, behind its links. Raises UnsupportedError if they lead out."""
    root = models_dir().resolve()
    place = Path(os.path.realpath(root / name))  # of links in a circle too
    if not place.is_relative_to(root):
        raise UnsupportedError(f"path:{name} leads out of the model directory; put the model under it.")
    return place


def held_models() -> tuple[str, ...]:
    """References to loadable models on this machine; of the hub's cache only where nothing may be downloaded."""
    return (*_folders(), *sorted(() if may_download() else _cached()))


def may_download() -> bool:
    """Whether models may come from the hub. HF_HUB_OFFLINE forbids it, with the values that the hub's library knows."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE")


def _folders() -> Iterator[str]:
    """The folders with a configuration, and the files of FILES, that this process can read, as references."""
    root = models_dir().resolve()
    level = [root]
    for _ in range(DEEPEST + 1):
        within = []
        for folder in level:
            if os.access(folder / CONFIGURATION, os.R_OK):
                yield f"path:{folder.relative_to(root)}"
            paths = _shown(folder, root)
            files = [path for path in paths if path.name.endswith(tuple(FILES))][:MOST_FOLDERS]
            readable = (path for path in files if os.path.isfile(path) and os.access(path, os.R_OK))
            yield from (f"path:{file.relative_to(root)}" for file in readable)
            within += [path for path in paths if os.path.isdir(path)]
        level = within[:MOST_FOLDERS]


def _shown(folder: Path, root: Path) -> list[Path]:
    """What lies in a folder, without what is hidden and without links out of `root`, which no reference may follow."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    shown = (folder / name for name in names if name.isprintable() and not name.startswith("."))
    return [path for path in shown if Path(os.path.realpath(path)).is_relative_to(root)]


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
            if CONFIGURATION in files and any(name.endswith(".safetensors") for name in files):
                name = f"hub:{repository.repo_id}"
                if "main" in revision.refs:
                    yield name
                yield from (f"{name}@{known}" for known in (*revision.refs, revision.commit_hash))
