"""Identifies a loaded model's weights by the hash of their files, or of the recipe that drew random ones."""

import hashlib
import os
from importlib.metadata import version
from pathlib import Path

from optigpu.documents.facts import WeightFacts
from optigpu.models.held import gguf_file, weight_files
from optigpu.models.reference import ModelReference, Preset, preset_of
from optigpu.vocabulary import canonical_json


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
