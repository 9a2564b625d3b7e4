"""The models that lie on this machine, under OPTIGPU_MODELS_DIR and in the cache of the hub. Loads no torch.

The files of a model's folder are looked at before a library reads them: an error names the file. And a loaded model's
weights are identified by the hash of their files, or of the recipe that drew random ones.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path, PurePath

from safetensors import SafetensorError, safe_open

from optigpu.documents.facts import WeightFacts
from optigpu.documents.fields import parse_json
from optigpu.models.reference import TRAINED, ModelReference, Preset, preset_of
from optigpu.paths import data_dir, expanded
from optigpu.vocabulary import SpecError, UnsupportedError, canonical_json

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


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers looks for, in this order: all weights in one file, or the list of several."""
TOKENIZER, TOKENIZER_CONFIGURATION = "tokenizer.json", "tokenizer_config.json"
PROCESSOR = "preprocessor_config.json"
_QUANTIZED = frozenset(("quantization_config", "compression_config"))
_INTEGERS = frozenset(("BOOL", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))))
"""As safetensors calls them."""
_SIZES = frozenset(
    (
        *("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "vocab_size"),
        *("n_embd", "n_positions", "n_head", "n_layer"),  # GPT-2, GPT-J, Bloom
        *("d_model", "max_seq_len", "n_heads", "n_layers"),  # MPT
        *("num_heads", "num_layers"),  # GPT-Neo
    )
)
"""Fields of a configuration that must be positive, by transformers' usual names and the families' own."""


def read_object(path: Path, reference: ModelReference) -> dict[str, object]:
    """The JSON object of a file, as leniently as transformers reads it. Raises UnsupportedError where it is none."""
    what = f"{path.name} of {reference}"
    try:
        found = parse_json(path.read_bytes(), what, strict=False)
    except OSError as error:
        raise UnsupportedError(f"{what} cannot be read: {error.strerror}.") from error
    except SpecError as error:
        raise UnsupportedError(str(error)) from error
    if not isinstance(found, dict):
        raise UnsupportedError(f"{what} holds no JSON object; copy or download the file again.")
    return found


def require_objects(folder: Path, names: Sequence[str], reference: ModelReference) -> None:
    """Raises UnsupportedError for the first of the files that is there and holds no JSON object."""
    for path in (folder / name for name in names):
        if path.exists():
            read_object(path, reference)


def read_configuration(path: Path, reference: ModelReference) -> dict[str, object]:
    """A config.json. Raises UnsupportedError also for one with a size that is not a positive whole number."""
    config = read_object(path, reference)
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedError(f"{path.name} of {reference} has no model_type that is text; correct it.")
    for name in sorted(_SIZES & config.keys()):
        size = config[name]
        if not isinstance(size, int | list | dict) or (isinstance(size, int) and size < 1):
            raise UnsupportedError(
                f"{path.name} of {reference} has {name} {size!r}, which is not a positive whole number; correct it."
            )
    return config


def weight_files(folder: Path, reference: ModelReference, named: str | None = None) -> list[Path]:
    """The files that transformers reads weights from, sorted by name; `named` is one that a configuration names.

    Raises FileNotFoundError if there are none, and UnsupportedError for an index that does not say which they are.
    """
    places = (folder / name for name in (named, SINGLE, INDEX) if name)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise FileNotFoundError(f"there is no {SINGLE} and no {INDEX}")
    if not path.name.endswith(".index.json"):
        return [path]
    files = read_object(path, reference).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise UnsupportedError(
            f"{path.name} of {reference} has no weight_map of tensors to files; copy or download it again."
        )
    for name in sorted(set(files.values())):
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise UnsupportedError(
                f"{path.name} of {reference} names {name!r}, which is outside of the model's folder; put the file "
                "into the folder."
            )
    return sorted({path.parent / name for name in files.values()})


def sound_directory(reference: ModelReference) -> Path:
    """The directory of a `path:` reference. Raises UnsupportedError if there is none, or as `require_sound` does."""
    folder = model_directory(reference.name)
    require_sound(folder, reference)
    return folder


def require_sound(folder: Path, reference: ModelReference) -> None:
    """Raises UnsupportedError for a configuration or files of weights that are missing, damaged, or of unexplained
    integers."""
    config = read_configuration(folder / CONFIGURATION, reference)
    named = config.get("transformers_weights")
    try:
        files = weight_files(folder, reference, named if isinstance(named, str) else None)
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"{reference} cannot be loaded here: {error}; copy or download its weights."
        ) from error
    for path in files:
        if reference.kind == "path":
            under_root(f"{reference.name}/{path.relative_to(folder)}")
        integers = _integer_weight(path, reference)
        if integers and not _QUANTIZED & config.keys():
            raise UnsupportedError(
                f"{path.name} of {reference} says that {integers} holds integers, and {CONFIGURATION} has no "
                "quantization_config; copy or download both again."
            )


def _integer_weight(path: Path, reference: ModelReference) -> str | None:
    """The first weight of a file that is stored as integers. Raises UnsupportedError for a damaged file."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = (name for name in sorted(file.keys()) if name.endswith(".weight"))
            return next((name for name in names if file.get_slice(name).get_dtype() in _INTEGERS), None)
    except (SafetensorError, OSError) as error:
        why = "there is no such file"
        if isinstance(error, SafetensorError):
            why = f"it is damaged ({error})"
        elif path.exists():
            why = (error.strerror or "it is not a file").lower()
        raise UnsupportedError(
            f"{path.name} of {reference} cannot be read: {why}; copy or download it again."
        ) from error


def origin_of(
    reference: ModelReference, name_or_path: str | None, seed: int, folder: Path, named: str | None = None
) -> WeightFacts:
    """Where the weights of a model come from; `bytes` and `parameters` are left out.

    `name_or_path` is what was read, as transformers says it; `named` is the file that its configuration names, if any.
    The hash of one file is what `sha256sum` prints; of several, the SHA-256 of what it prints for them in the order of
    their names. Random weights have a recipe: architecture, seed, and the libraries that draw them. `folder` is shared
    by a job's processes and keeps the hashes of files that have not changed since.
    """
    preset = preset_of(reference)
    if preset:
        architecture = architecture_digest(preset)
        libraries = {name: version(name) for name in ("torch", "transformers")}
        recipe = {"architecture": architecture, "seed": seed, "libraries": libraries}
        return WeightFacts(hash=_digest(recipe), hash_of="recipe", revision=architecture)
    revision, reasons = None, {"revision": _NO_REVISION[reference.kind]}
    try:
        file = gguf_file(reference)
        source = file.parent if file else _source(reference, name_or_path)
        if reference.kind == "hub":
            revision, reasons = source.name, {}
        files = {
            path.name: hash_of(path, folder)
            for path in ([file] if file else weight_files(source, reference, named))
        }
    except OSError as error:
        why = f"The files that {reference} was loaded from cannot be read again: {error.strerror or error}."
        return WeightFacts(revision=revision, reasons=reasons | {"hash": why})
    lines = "".join(f"{found}  {name}\n" for name, found in sorted(files.items()))
    combined = hashlib.sha256(lines.encode()).hexdigest() if len(files) > 1 else next(iter(files.values()))
    return WeightFacts(hash=combined, hash_of="files", files=files, revision=revision, reasons=reasons)


_NO_REVISION = {
    "hub": "The hub's local cache does not say which commit was read.",
    "path": "A directory has no revision; the weight hash identifies its content.",
    "bundled": "A bundled model has no revision; the weight hash identifies it.",
}


def architecture_digest(preset: Preset) -> str:
    return _digest({"model_type": preset.model_type, "config": preset.config})


def _source(reference: ModelReference, name_or_path: str | None) -> Path:
    """The directory that was read; for the hub, that in the local cache which is named like the commit."""
    if reference.kind != "hub":
        return Path(name_or_path or "")
    from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

    found = try_to_load_from_cache(reference.name, "config.json", revision=reference.revision or "main")
    if not isinstance(found, str):
        raise FileNotFoundError(f"the hub's local cache does not hold {reference}")
    return Path(found).parent


def hash_of(path: Path, folder: Path) -> str:
    """The SHA-256 of a file's bytes; remembered under what would be different if the file had been changed."""
    status = path.stat()
    key = [str(path.resolve()), status.st_ino, status.st_size, status.st_mtime_ns]
    note = folder / "weights" / _digest(key)
    if note.exists():
        return note.read_text("ascii")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    draft = note.with_suffix(f".{os.getpid()}")
    draft.write_text(found, "ascii")
    draft.replace(note)  # whole or not at all, for the others that look
    return found


def _digest(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()
