"""Moves the tensors that autograd saves to a store, and brings them back."""

import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optigpu.models.loading.storages import storage_of
from optigpu.techniques.base import Notes

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
