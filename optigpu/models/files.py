"""The files of a model's folder, looked at before a library reads them: an error names the file. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from safetensors import SafetensorError, safe_open

from optigpu.documents.fields import parse_json
from optigpu.models.held import CONFIGURATION, model_directory, under_root
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import SpecError, UnsupportedError

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
