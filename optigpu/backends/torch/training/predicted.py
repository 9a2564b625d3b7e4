"""Predicts the peak of a step of training: the very step runs, on tensors that have shapes and no numbers.

torch's FakeTensorMode gives each operator's outputs their shapes, dtypes and device and allocates nothing; a mode
around it adds up the storages that are alive, and what a convolution holds while it runs. So whatever a technique does
to a step is in the prediction, recomputation and narrower types included, and a model that fits no memory can be
predicted.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.initialization import TORCH_INIT_FUNCTIONS

from optigpu.backends.torch.training.convolutions import bytes_within
from optigpu.backends.torch.training.model import TrainableModel
from optigpu.backends.training import TrainingBatch, TrainingNeed, UpdateRule
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError

_DRAWN_AGAIN = "trunc_normal_"
"""torch draws such weights until all are within bounds."""
_PACKED = "find_packed_sequence_indices"
_EXCHANGE = "_apply"
BatchOf = Callable[[Any], TrainingBatch]
"""Draws the samples of a step for a model's facts."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from the operator that made them until nothing refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = self.now
        made = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, before + bytes_within(function, args, made))
        # A view of numpy's memory is the host's: torch allocates nothing for it.
        is_lent = function is torch.ops.aten.lift_fresh.default
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.count(each, is_lent=is_lent)
        return made

    def count(self, tensor: torch.Tensor, *, is_lent: bool = False) -> None:
        """Adds a tensor's storage, if it was not counted yet; memory that is lent takes no bytes."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = 0 if is_lent else storage.nbytes()
        weakref.finalize(storage, self._free, key)
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class NumbersAsExpected(TorchDispatchMode):
    """Answers who reads a number: true for a condition, such as whether weights are finite, 0 for a size, such as
    how far two outputs differ."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except DataDependentOutputException:
            # A number that torch knows, such as an optimizer's count of steps, was answered above.
            if function is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return True if dtype is torch.bool else 0.0 if dtype.is_floating_point else 1


def predicted_need(
    rule: UpdateRule, model: str, stack: tuple[Technique, ...], batches: tuple[BatchOf, ...]
) -> tuple[TrainingNeed, ...]:
    """What steps with these batches need, each after a first one that has made the optimizer's states.

    Raises UnsupportedError for a stack whose step depends on numbers: loss scaling, or a library's own operators.
    """
    names = " + ".join(technique.name for technique in stack) or "a plain step"
    refusal = (
        f"The memory of training with {names} cannot be told from shapes alone; measure it with the workload "
        "train_step."
    )
    try:
        with _shapes_alone():
            trained = TrainableModel(rule, model, stack, DeviceKind.CPU, 0, _ignore)
            if trained.trainer.parts.loss_scaling:
                raise UnsupportedError(refusal)
            _step(trained, batches[0])
            return tuple(_need(trained, batch) for batch in batches)
    except (RuntimeError, ZeroDivisionError) as error:
        raise UnsupportedError(refusal) from error


def _need(trained: TrainableModel, batch: BatchOf) -> TrainingNeed:
    live = LiveBytes()
    for tensor in trained.held():
        live.count(tensor)
    held = live.now
    with live:
        _step(trained, batch)
    weights = {id(tensor.untyped_storage()): tensor for tensor in _weights(trained)}
    weight_bytes = sum(tensor.untyped_storage().nbytes() for tensor in weights.values())
    return TrainingNeed(weight_bytes=weight_bytes, held_bytes=held, peak_bytes=live.peak)


def _step(trained: TrainableModel, batch: BatchOf) -> None:
    """What Trainer.step does, without reading the loss, which is a number."""
    trainer = trained.trainer
    rows = trainer.parts.arrange(batch(trained.facts))
    targets = sum(each.targets for each in rows)
    for each in rows:
        (trainer.forward(each) / targets).backward()
    trainer.update()


def _weights(trained: TrainableModel) -> Iterator[torch.Tensor]:
    yield from trained.model.parameters()
    yield from trained.model.buffers()


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Without what reads numbers: one way to draw weights, and transformers' search for packed sequences.

    torch exchanges a module's tensors for converted ones unless somebody refers to them weakly, which FakeTensorMode
    does; ones that are converted already stay.
    """
    with ExitStack() as contexts:
        contexts.callback(TORCH_INIT_FUNCTIONS.update, {_DRAWN_AGAIN: TORCH_INIT_FUNCTIONS[_DRAWN_AGAIN]})
        TORCH_INIT_FUNCTIONS[_DRAWN_AGAIN] = _as_it_is
        contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        contexts.enter_context(NumbersAsExpected())  # type: ignore[no-untyped-call]
        contexts.callback(setattr, masking_utils, _PACKED, getattr(masking_utils, _PACKED))
        setattr(masking_utils, _PACKED, _not_packed)
        contexts.callback(_forget_tables)
        contexts.callback(setattr, torch.nn.Module, _EXCHANGE, getattr(torch.nn.Module, _EXCHANGE))
        setattr(torch.nn.Module, _EXCHANGE, _exchanged_if_changed(getattr(torch.nn.Module, _EXCHANGE)))
        yield


def _as_it_is(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def _exchanged_if_changed(exchanged: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """In place of torch's own way, which it goes where a tensor changes."""

    def applied(
        module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        held = chain(module.parameters(recurse), module.buffers(recurse))
        is_converted = all(convert(tensor) is tensor for tensor in held)
        return module if is_converted else exchanged(module, convert, recurse)

    return applied


def _forget_tables() -> None:
    """bitsandbytes keeps the table of levels that its first call makes, which had no numbers here."""
    library = sys.modules.get("bitsandbytes.functional")
    if library is not None:
        library.name2qmap.clear()


def _not_packed(position_ids: torch.Tensor) -> None:
    """In place of transformers' search for packed sequences."""


def _ignore(doing: str) -> None:
    """Progress is not shown."""
