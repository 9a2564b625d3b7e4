"""A decoder's packed weights, kept in the cache folder: packing takes many times as long as reading.

    facts = pack_or_restore(model, places, options)

The entry of a key depends on the key's model, options and sources alone. A lock lets one process write at a time.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from optigpu.paths import Bound, BoundedFolder, cache_dir, mark_used
from optigpu.surgery.places import Place
from optigpu.techniques.decoding.native_decode.packing import (
    Packed,
    Packer,
    packed_tensors,
    restore_layers,
)
from optigpu.techniques.decoding.native_decode.prediction import PackingOptions
from optigpu.techniques.decoding.native_decode.within import pack_within
from optigpu.vocabulary import UnsupportedError

BOUND = Bound("OPTIGPU_DECODE_CACHE_GB", default=20 * 2**30, files="packed weights")
"""With a bound of 0 the store is off, and no key is needed either."""
LOCK_TIMEOUT_S = 60
"""Writers of other processes need a few GB each; after the timeout the weights are not stored."""
AT_ONCE = 2**22
"""Bytes that are hashed at once: the size of the pieces that are copied from the accelerator."""
SUFFIX = ".safetensors"

PACKAGE = Path(__file__).resolve().parents[3]
SOURCES = ("models", "ops", "surgery", "techniques/decoding/native_decode")
"""The folders that decide how weights are packed. A change of one of their files changes all keys."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StoredPacking:
    """Stored tensors by name, and facts as JSON.

    The tensors are the file's own pages, on the CPU: the caller copies them where it wants them. Writing into them
    does not reach the file.
    """

    tensors: Tensors
    facts: dict[str, Any]


def pack_or_restore(
    model: PreTrainedModel,
    places: Sequence[Place],
    options: PackingOptions,
    doing: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Replaces the linear layers by packed ones, from the store if it has them; returns their facts.

    Weights of 8 and 16 bits are not kept: making them anew takes no longer than reading them.
    """
    is_kept = options.weights not in ("w8", "bf16") and BOUND.most_bytes() > 0
    key = key_of(model, asdict(options) | {"device": model.device.type}) if is_kept else None
    kept = load(key) if key else None
    if kept is not None:
        packed = Packed(kept.facts["kinds"], kept.facts["facts"])
        restore_layers(places, options.group, packed, kept.tensors)
        return packed.facts
    packer = Packer(model, places, options, doing)
    packed = pack_within(packer) if options.weights == "auto" else packer.pack()
    if key:
        save(key, packed_tensors(model, list(packed.kinds)), {"kinds": packed.kinds, "facts": packed.facts})
    return packed.facts


def key_of(model: PreTrainedModel, options: Mapping[str, Any]) -> str:
    """The key of a loaded transformers model, packed with `options` by these sources: a core's second for each GB.

    `options` are JSON: what the technique was asked for and the type of the device. Tied weights are read once.
    """
    found = hashlib.blake2b(digest_size=20)
    _add(found, torch.__version__, model.config.to_json_string(), json.dumps(options, sort_keys=True))
    for folder in SOURCES:
        for source in sorted((PACKAGE / folder).rglob("*")):
            if source.suffix in (".py", ".cpp", ".h"):
                _add(found, source.read_bytes())
    _add_tensors(found, chain(model.named_parameters(), model.named_buffers()))
    return found.hexdigest()


def load(key: str) -> StoredPacking | None:
    """The entry of a key, mapped into memory and marked as the most recently used; None if there is none.

    A file that is not what was saved is removed and counts as none. Raises UnsupportedError as the bound does.
    """
    folder = _folder()
    if folder is None:
        return None
    path = folder.path / f"{key}{SUFFIX}"
    try:
        found = _read(path)
    except OSError:
        return None
    except (SafetensorError, ValueError):
        with suppress(OSError):
            path.unlink()
        return None
    mark_used(path)
    return found


def save(key: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> bool:
    """Stores tensors of any device and facts, which are JSON, in place of the key's earlier entry.

    False, with nothing kept, where the store is off, more than it may hold is asked for, the folder cannot be written,
    the disk is full, or others write for too long. Raises RuntimeError when two tensors overlap in memory, and
    UnsupportedError as the bound does.
    """
    folder = _folder()
    if folder is None or sum(tensor.nbytes for tensor in tensors.values()) > folder.most:
        return False
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    about = json.dumps(facts)
    path = folder.path / f"{key}{SUFFIX}"
    try:
        with folder.locked(LOCK_TIMEOUT_S), folder.draft_of(path) as draft:
            save_file(whole, draft, {"facts": about, "digest": _digest(whole, about)})
            if draft.stat().st_size > folder.most:
                return False
            folder.admit(draft)
            return True
    # NotImplementedError: a file system without locks.
    except (OSError, NotImplementedError, SafetensorError):
        return False


def _folder() -> BoundedFolder | None:
    """The folder of the store; None if the store is off."""
    most = BOUND.most_bytes()
    if not most:
        return None
    try:
        return BoundedFolder(cache_dir() / "decode", SUFFIX, most)
    except UnsupportedError:  # there is no folder to keep anything in
        return None


def _read(path: Path) -> StoredPacking:
    """Raises SafetensorError or ValueError for a file that is not as `save` left it, OSError for none."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    about = metadata.get("facts", "")
    if metadata.get("digest") != _digest(tensors, about):
        raise ValueError(f"{path} is damaged.")
    return StoredPacking(tensors, json.loads(about))


def _digest(tensors: Tensors, about: str) -> str:
    """Digest of a file's content: after a disk error or a power failure a damaged file may have the right length."""
    found = hashlib.blake2b(digest_size=20)
    _add(found, about)
    _add_tensors(found, sorted(tensors.items()))
    return found.hexdigest()


def _add_tensors(found: hashlib.blake2b, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Adds the digest of each, by as many threads as torch has."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        _add(found, *pool.map(_digest_of, tensors))


def _digest_of(named: tuple[str, torch.Tensor]) -> bytes:
    """Hashes a tensor's bytes in place, so that at most a piece of a contiguous tensor is copied at a time."""
    name, tensor = named
    found = hashlib.blake2b(digest_size=20)
    _add(found, f"{name} {tensor.dtype} {list(tensor.shape)}")
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(AT_ONCE):
        found.update(piece.cpu().numpy())
    return found.digest()


def _add(found: hashlib.blake2b, *parts: str | bytes) -> None:
    """Adds each with its length, so that no two lists of parts give the same bytes."""
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
