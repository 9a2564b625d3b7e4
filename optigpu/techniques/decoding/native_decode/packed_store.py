"""A decoder's packed weights, kept in the cache folder: packing takes minutes where reading takes a second.

    facts = pack_or_restore(model, places, options)

The entry of a key depends on the key's model, options and sources alone. A lock lets one process write at a time.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock  # torch itself depends on it
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from optigpu.paths import cache_dir
from optigpu.surgery.places import Place
from optigpu.techniques.decoding.native_decode.layers import packed_tensors
from optigpu.techniques.decoding.native_decode.packing import (
    Packed,
    PackingOptions,
    pack_layers,
    restore_layers,
)
from optigpu.techniques.decoding.native_decode.sources import sources_of
from optigpu.vocabulary import UnsupportedError

STORED_GIB_VARIABLE = "OPTIGPU_DECODE_CACHE_GB"
"""The environment variable for the bound of the store in GiB; 0 turns the store off."""
MOST_STORED_BYTES = 20 * 2**30
"""The default bound of the folder. The least recently used files are removed first."""
LOCK_TIMEOUT_S = 60
"""Writers of other processes need a few GB each; after the timeout the weights are not stored."""
AT_ONCE = 2**22
"""Bytes that are hashed at once: the size of the pieces that are copied from the accelerator."""
STORED_SUFFIX, LOCK_SUFFIX, UNFINISHED_SUFFIX = ".safetensors", ".lock", ".unfinished"

PACKING_MODULE = "optigpu.techniques.decoding.native_decode.packing"
"""The module that decides how weights are packed. A change of its file, or of a file that it imports, changes all
keys."""

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
    model: PreTrainedModel, places: Sequence[Place], options: PackingOptions
) -> dict[str, Any]:
    """Replaces the linear layers by packed ones, from the store if it has them; returns their facts.

    Only 4-bit weights are kept: making others anew takes no longer than reading them.
    """
    is_kept = options.weights == "w4" and most_bytes() > 0
    key = key_of(model, asdict(options) | {"device": model.device.type}) if is_kept else None
    kept = load(key) if key else None
    if kept is not None:
        packed = Packed(kept.facts["kinds"], kept.facts["facts"])
        restore_layers(places, options, packed, kept.tensors)
        return packed.facts
    packed = pack_layers(model, places, options)
    if key:
        save(key, packed_tensors(model, list(packed.kinds)), {"kinds": packed.kinds, "facts": packed.facts})
    return packed.facts


def most_bytes() -> int:
    """The bound of the folder; 0 if the store is off, and then no key is needed either.

    Raises UnsupportedError when the environment's bound is not a number from 0 on.
    """
    text = os.environ.get(STORED_GIB_VARIABLE)
    if not text:
        return MOST_STORED_BYTES
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise UnsupportedError(
            f"{STORED_GIB_VARIABLE} must be a number of GiB from 0 on, not {text!r}; 0 keeps no packed weights."
        )
    return int(gib * 2**30)


def key_of(model: PreTrainedModel, options: Mapping[str, Any]) -> str:
    """The key of a loaded transformers model, packed with `options` by these sources; takes a second for each GB.

    `options` are JSON: what the technique was asked for and the type of the device. Tied weights are read once.
    """
    found = hashlib.blake2b(digest_size=20)
    _add(found, torch.__version__, model.config.to_json_string(), json.dumps(options, sort_keys=True))
    for source in sources_of(PACKING_MODULE):
        _add(found, source.read_bytes())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        _add_tensor(found, name, tensor)
    return found.hexdigest()


def load(key: str) -> StoredPacking | None:
    """The entry of a key, mapped into memory and marked as the most recently used; None if there is none.

    A file that is not what was saved is removed and counts as none. Raises UnsupportedError as `most_bytes` does.
    """
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{key}{STORED_SUFFIX}"
    try:
        found = _read(path)
    except OSError:
        return None
    except (SafetensorError, ValueError):
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):  # a folder that can only be read is used without the update
        os.utime(path)
    return found


def save(key: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> bool:
    """Stores tensors of any device and facts, which are JSON, in place of the key's earlier entry.

    False, with nothing kept, where the store is off, more than it may hold is asked for, the folder cannot be written,
    the disk is full, or others write for too long. Raises RuntimeError when two tensors overlap in memory, and
    UnsupportedError as `most_bytes` does.
    """
    folder, most = _folder(), most_bytes()
    if folder is None or sum(tensor.nbytes for tensor in tensors.values()) > most:
        return False
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    about = json.dumps(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(folder / f"decode{LOCK_SUFFIX}", timeout=LOCK_TIMEOUT_S):
            return _write(folder / f"{key}{STORED_SUFFIX}", whole, about, most)
    except (
        OSError,
        NotImplementedError,
        SafetensorError,
    ):  # NotImplementedError: a file system without locks
        return False


def _folder() -> Path | None:
    """The folder of the store; None if the store is off."""
    if not most_bytes():
        return None
    try:
        return cache_dir() / "decode"
    except RuntimeError:  # there is no home folder
        return None


def _read(path: Path) -> StoredPacking:
    """Raises SafetensorError or ValueError for a file that is not as `_write` left it, OSError for none."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    about = metadata.get("facts", "")
    if metadata.get("digest") != _digest(tensors, about):
        raise ValueError(f"{path} is damaged.")
    return StoredPacking(tensors, json.loads(about))


def _write(path: Path, tensors: Tensors, about: str, most: int) -> bool:
    """Whether the file is not larger than `most` bytes and so was kept. Only who holds the lock calls this.

    Written under another name and renamed, so that half a file is never read.
    """
    _clean(path.parent)
    unfinished = path.with_suffix(UNFINISHED_SUFFIX)
    try:
        save_file(tensors, unfinished, {"facts": about, "digest": _digest(tensors, about)})
        size = unfinished.stat().st_size
        if size > most:
            return False
        _make_room(path, most - size)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def _clean(folder: Path) -> None:
    """Removes what a process that was killed left unfinished, under safetensors' name for it or ours."""
    for path in folder.iterdir():
        if path.suffix not in (STORED_SUFFIX, LOCK_SUFFIX):
            path.unlink(missing_ok=True)


def _make_room(path: Path, room: int) -> None:
    """Removes the least recently used until others than `path`, which is about to be replaced, have `room` bytes."""
    others = [(other, other.stat()) for other in path.parent.glob(f"*{STORED_SUFFIX}") if other != path]
    size = sum(known.st_size for _, known in others)
    for other, known in sorted(others, key=lambda item: item[1].st_mtime_ns):
        if size <= room:
            return
        other.unlink(missing_ok=True)
        size -= known.st_size


def _digest(tensors: Tensors, about: str) -> str:
    """Digest of a file's content: after a disk error or a power failure a damaged file may have the right length."""
    found = hashlib.blake2b(digest_size=20)
    _add(found, about)
    for name in sorted(tensors):
        _add_tensor(found, name, tensors[name])
    return found.hexdigest()


def _add_tensor(found: hashlib.blake2b, name: str, tensor: torch.Tensor) -> None:
    """Hashes a tensor's bytes in place, so that at most a piece of a contiguous tensor is copied at a time."""
    _add(found, f"{name} {tensor.dtype} {list(tensor.shape)}")
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(AT_ONCE):
        found.update(piece.cpu().numpy())


def _add(found: hashlib.blake2b, *parts: str | bytes) -> None:
    """Adds each with its length, so that no two lists of parts give the same bytes."""
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
