"""Weights of decoder layers and tensors that autograd saves, in the host's memory.

The weights are copied to the device one layer at a time; saved tensors go to the host or to a disk, and come back.

Two staging slots of the device take turns: while one layer computes in the first, the next one is copied into the
second (Sheng et al., FlexGen, 2023, arXiv:2303.06865, overlaps the same way). After a layer its weights point to the
host again; nothing is copied back, since they do not change. How bytes travel is a `Lane`'s: plain copies, or pinned
memory and a separate stream.
"""

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from optigpu.models.loading.storages import storage_of
from optigpu.surgery.extras import STAGING_SLOTS
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

ALIGNMENT = 256
"""Bytes between the beginnings of tensors in a slot, as torch's own allocators align: any kernel may read them."""


class Lane(Protocol):
    """The interface of copies to the device."""

    def empty(self, size: int) -> torch.Tensor:
        """A new buffer of bytes on the host that `send` can read quickly."""

    def send(self, source: torch.Tensor, slot: int, target: torch.Tensor) -> None:
        """Begins to copy into a slot, once what computes with it has ended."""

    def arrive(self, slot: int) -> None:
        """Makes later computations wait for the last copy into the slot."""

    def leave(self, slot: int) -> None:
        """Makes later copies into the slot wait for the computations so far."""


class CudaLane:
    """Copies out of pinned memory on a stream of their own, beside what is computed on the current one."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._arrived = [torch.cuda.Event() for _ in range(STAGING_SLOTS)]
        self._left = [torch.cuda.Event() for _ in range(STAGING_SLOTS)]

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor, slot: int, target: torch.Tensor) -> None:
        self._stream.wait_event(self._left[slot])
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._arrived[slot].record(self._stream)

    def arrive(self, slot: int) -> None:
        torch.cuda.current_stream().wait_event(self._arrived[slot])

    def leave(self, slot: int) -> None:
        self._left[slot].record(torch.cuda.current_stream())


class Parcel:
    """One layer's tensors in one buffer of the host, and their places in each slot."""

    def __init__(self, tensors: Sequence[torch.Tensor], lane: Lane) -> None:
        self._tensors = tensors
        self.size = sum(map(_room, tensors))
        self.buffer = lane.empty(self.size)
        self._home = _views(self.buffer, tensors)
        self._staged: list[list[torch.Tensor]] = []
        for tensor, home in zip(tensors, self._home, strict=True):
            home.copy_(tensor.data)
        self.evict()

    def know(self, slots: Sequence[torch.Tensor]) -> None:
        """Sets the places of its tensors in each slot."""
        self._staged = [_views(slot, self._home) for slot in slots]

    def enter(self, slot: int) -> None:
        """The layer uses the tensors in the slot."""
        _point(self._tensors, self._staged[slot])

    def evict(self) -> None:
        """The layer's weights are those on the host."""
        _point(self._tensors, self._home)


class Schedule:
    """Assigns layers to slots and starts their copies: the requested layer, then its successor."""

    def __init__(self, parcels: Sequence[Parcel], slots: Sequence[torch.Tensor], lane: Lane) -> None:
        self._parcels, self._slots, self._lane = parcels, slots, lane
        self._holds: list[int | None] = [None] * len(slots)
        for parcel in parcels:
            parcel.know(slots)
        for slot in range(len(slots)):
            # Its memory may have belonged to what is still computed.
            lane.leave(slot)

    def before(self, layer: int) -> None:
        """Brings a layer in, unless it is there, and sends for the next one, the first after the last."""
        slot = self._fetch(layer, beside=None)
        self._lane.arrive(slot)
        self._parcels[layer].enter(slot)
        self._fetch((layer + 1) % len(self._parcels), beside=slot)

    def after(self, layer: int) -> None:
        """The layer has computed, or failed."""
        self._lane.leave(self._holds.index(layer))
        self._parcels[layer].evict()

    def _fetch(self, layer: int, beside: int | None) -> int:
        if layer in self._holds:
            return self._holds.index(layer)
        slot = 1 if beside == 0 else 0
        parcel = self._parcels[layer]
        self._lane.send(parcel.buffer, slot, self._slots[slot][: parcel.size])
        self._holds[slot] = layer
        return slot


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The list of a transformers decoder's layers: the first one that is as long as the configuration says.

    Raises UnsupportedError when there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    found = next((module for module in lists if len(module) == count), None)
    if found is None:
        raise UnsupportedError(
            "cpu_offload needs a model with a list of decoder layers, and this one has none; leave it out of the stack."
        )
    return found


def offload(model: PreTrainedModel, device: torch.device, lane: Lane) -> dict[str, int]:
    """Keeps the weights of a model's decoder layers on the host, and all others on `device`; returns facts in bytes.

    What a layer shares with the rest of the model stays on the device with it. Raises UnsupportedError when there are
    no decoder layers, or weights of a kind that cannot be laid into a buffer of bytes. On any error the model computes
    what it did, where it did.
    """
    layers = decoder_layers(model)
    within = set(layers.modules())
    others = [module for module in model.modules() if module not in within]
    rest = _unique(
        tensor
        for module in others
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    shared = set(map(id, rest))
    inside = [
        _unique(tensor for tensor in (*layer.parameters(), *layer.buffers()) if id(tensor) not in shared)
        for layer in layers
    ]
    _require_plain([tensor for tensors in inside for tensor in tensors])
    homes = [tensor.device for tensor in rest]
    try:
        _point(rest, [tensor.data.to(device) for tensor in rest])
        size = max(sum(map(_room, tensors)) for tensors in inside)
        slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(STAGING_SLOTS)]
        parcels = [Parcel(tensors, lane) for tensors in inside]
    except Exception:
        _point(rest, [tensor.data.to(home) for tensor, home in zip(rest, homes, strict=True)])
        raise
    schedule = Schedule(parcels, slots, lane)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: schedule.before(number))
        layer.register_forward_hook(lambda *_, number=number: schedule.after(number), always_call=True)
    return {
        "offloaded_layers": len(layers),
        "offloaded_bytes": sum(parcel.size for parcel in parcels),
        "staging_bytes": STAGING_SLOTS * size,
    }


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor once; tensors have no useful equality."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _require_plain(tensors: Sequence[torch.Tensor]) -> None:
    kinds = {type(tensor) for tensor in tensors if type(tensor) not in (torch.Tensor, torch.nn.Parameter)}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UnsupportedError(
            f"cpu_offload copies plain tensors, and this model's layers hold {names}; leave out the technique that "
            "made them."
        )


def _point(tensors: Sequence[torch.Tensor], data: Sequence[torch.Tensor]) -> None:
    for tensor, values in zip(tensors, data, strict=True):
        tensor.data = values


def _views(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same types, shapes and orders of dimensions in a buffer of bytes, one behind the other.

    Strides are a tensor's own where it fills its memory, and those of a contiguous one where it has gaps.
    """
    views, begin = [], 0
    for tensor in tensors:
        flat = buffer[begin : begin + tensor.nbytes].view(tensor.dtype)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        like = tensor if last + 1 == tensor.numel() else torch.empty(tensor.shape, device="meta")
        views.append(flat.as_strided(tensor.shape, like.stride()))
        begin += _room(tensor)
    return views


def _room(tensor: torch.Tensor) -> int:
    """A tensor's bytes, and those up to the next one's beginning."""
    return -(-int(tensor.nbytes) // ALIGNMENT) * ALIGNMENT


def destination() -> tuple[torch.device, Lane]:
    """The device of the slots, and the lane that copies to it."""
    return torch.device("cuda"), CudaLane()


Restore = Callable[[], torch.Tensor]
"""Brings a stored tensor back: the same values, contiguous, on the device that it came from."""


class HostStore:
    """Pinned memory. Copies are in the order of the device's stream, so no operation waits for the host.

    What `put` copies is kept until the function that it returns is freed.
    """

    def put(self, tensor: torch.Tensor) -> Restore:
        stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stored.copy_(tensor, non_blocking=True)
        device = tensor.device
        return lambda: stored.to(device, non_blocking=True)


class DiskStore:
    """A file without a name, so that nothing of it is left however the process ends; `put` as HostStore's."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the last stored tensor
        weakref.finalize(self, self._file.close)
        self._end = 0

    def put(self, tensor: torch.Tensor) -> Restore:
        begin, shape, dtype, device = self._end, tensor.shape, tensor.dtype, tensor.device
        self._file.seek(begin)
        self._end += self._file.write(_bytes_of(tensor.detach().cpu().contiguous()))

        def restore() -> torch.Tensor:
            found = torch.empty(shape, dtype=dtype)
            self._file.seek(begin)
            self._file.readinto(_bytes_of(found))
            return found.to(device)

        return restore


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data


Saved = torch.Tensor | Restore
"""What autograd holds instead of a saved tensor: the tensor itself, or how to get it back."""


class OffloadedSaving:
    """Makes the context of a forward pass whose saved tensors go to a store of its own."""

    def __init__(
        self,
        model: torch.nn.Module,
        new_store: type[HostStore | DiskStore],
        smallest_bytes: int,
        notes: Notes,
    ) -> None:
        """Tensors of fewer bytes stay, and so do the model's weights."""
        self._model, self._new_store, self._smallest, self._notes = model, new_store, smallest_bytes, notes

    @contextmanager
    def __call__(self) -> Iterator[None]:
        held = chain(self._model.parameters(), self._model.buffers())
        one_pass = _OnePass(self._new_store(), self._smallest, set(map(storage_of, held)))
        with torch.autograd.graph.saved_tensors_hooks(
            one_pass.pack, lambda saved: saved if isinstance(saved, torch.Tensor) else saved()
        ):
            yield
        self._notes.record(offloaded_tensors=one_pass.tensors, offloaded_bytes=one_pass.bytes)


class _OnePass:
    """What one forward pass has stored so far; `tensors` and `bytes` count it."""

    def __init__(self, store: HostStore | DiskStore, smallest: int, weights: set[int]) -> None:
        self._store, self._smallest, self._weights = store, smallest, weights
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, Restore]] = {}
        self.tensors = self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> Saved:
        repeats = tensor.nbytes > tensor.untyped_storage().nbytes()  # an expanded view is less than its copy
        if tensor.nbytes < self._smallest or storage_of(tensor) in self._weights or repeats:
            return tensor
        # The weak reference keeps the storage's address from being used again while the pass goes on.
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (
            storage.cdata, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = storage, self._store.put(tensor)
            self.tensors += 1
            self.bytes += tensor.nbytes
        return self._known[key][1]
