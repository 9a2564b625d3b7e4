"""Predicts the peak of a step of training: the very step runs, on tensors that have shapes and no numbers.

torch's FakeTensorMode allocates nothing; a mode around it adds up the storages that are alive, and what a convolution
holds while it runs. On a CPU oneDNN convolves copies in blocks of as many channels as a vector register has float32
numbers, the last block padded. Few channels are read as they are, the gradient to the input of a strided convolution
is made with its channels last, and a weight's gradient in bfloat16 is summed in float32. What a thread has for itself
is not counted.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.initialization import TORCH_INIT_FUNCTIONS

from optigpu.backends.torch.training_step import TrainableModel
from optigpu.backends.training import TrainingBatch, TrainingNeed, UpdateRule
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError

_DRAWN_AGAIN = "trunc_normal_"
"""torch draws such weights until all are within bounds."""
_PACKED = "find_packed_sequence_indices"
BatchOf = Callable[[Any], TrainingBatch]
"""Draws the samples of a step for a model's facts."""
IMAGE_CHANNELS = 3
NARROW = 8
"""Channels of a block where an input has fewer than a register takes."""
FLOAT = 4
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]


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
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = 0 if is_lent else storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)

        def free() -> None:
            self.now -= self._sizes.pop(key)

        weakref.finalize(storage, free)


class NumbersAsExpected(TorchDispatchMode):
    """Answers who reads a number: true for a condition (weights are finite), 0 for a size (how far outputs differ)."""

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
    """What steps need after a first one. Raises UnsupportedError for a stack whose step depends on numbers."""
    names = " + ".join(technique.name for technique in stack) or "a plain step"
    refusal = (
        f"The memory of training with {names} cannot be told from shapes alone; measure it with the workload "
        "train_step."
    )
    try:
        with _shapes_alone():
            trained = TrainableModel(rule, model, stack, DeviceKind.CPU, 0, lambda _doing: None)
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
    every = chain(trained.model.parameters(), trained.model.buffers())
    weights = {id(tensor.untyped_storage()): tensor for tensor in every}
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


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Without what reads numbers: one way to draw weights, and transformers' search for packed sequences.

    torch exchanges a module's tensors for converted ones unless somebody refers to them weakly, which FakeTensorMode
    does; ones that are converted already stay.
    """
    exchanged: Callable[..., torch.nn.Module] = torch.nn.Module._apply

    def applied(
        module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        held = chain(module.parameters(recurse), module.buffers(recurse))
        is_converted = all(convert(tensor) is tensor for tensor in held)
        return module if is_converted else exchanged(module, convert, recurse)

    with (
        patch.dict(TORCH_INIT_FUNCTIONS, {_DRAWN_AGAIN: lambda tensor, *_, **__: tensor}),
        FakeTensorMode(allow_non_fake_inputs=True),
        NumbersAsExpected(),  # type: ignore[no-untyped-call]
        patch.object(masking_utils, _PACKED, lambda *_, **__: None),
        patch.object(torch.nn.Module, "_apply", applied),
    ):
        try:
            yield
        finally:
            # bitsandbytes keeps the table of levels that its first call makes, which had no numbers here.
            if library := sys.modules.get("bitsandbytes.functional"):
                library.name2qmap.clear()


def bytes_within(function: object, args: Sequence[object], made: object) -> int:
    """The most that an operator holds beside what it is given: copies, and what it makes. 0 if it is no convolution."""
    if function is _FORWARD:
        given, weight, output = cast(tuple[torch.Tensor, ...], (*args[:2], made))
        rest = args[3:9]
    elif function is _BACKWARD:
        output, given, weight = cast(tuple[torch.Tensor, ...], args[:3])
        rest = args[4:10]
    else:
        return 0
    to_input, to_weight = cast(Sequence[bool], args[10])[:2] if function is _BACKWARD else (False, False)
    backend = torch._C._select_conv_backend(given, weight, None, *rest)
    if backend == _BACKENDS.Slow2d:
        makes = output.nbytes if function is _FORWARD else to_input * given.nbytes + to_weight * weight.nbytes
        if weight[0, 0].numel() == 1:  # a 1x1 convolution reads the input itself
            return makes
        patches = given.shape[0] * given.shape[1] * weight[0, 0].numel() * output[0, 0].numel()
        return makes + patches * given.element_size()  # as the columns of a matrix
    if backend != _BACKENDS.Mkldnn:
        return 0
    convolution = _Convolution(given, weight, output, math.prod(cast(Sequence[int], rest[0])) > 1)
    if function is _FORWARD:
        return convolution.forward_bytes()
    kept = to_input * given.nbytes
    return max(to_input * convolution.to_input_bytes(), to_weight * (kept + convolution.to_weight_bytes()))


@dataclass(frozen=True)
class _Convolution:
    """One of oneDNN: `given` and `output` [rows, channels, ...], `weight` [outputs, inputs of a group, ...]."""

    given: torch.Tensor
    weight: torch.Tensor
    output: torch.Tensor
    is_strided: bool

    def forward_bytes(self) -> int:
        """Copies of both operands and of the output, then that one beside the output."""
        given, output = 0 if self._is_narrow else _blocked(self.given), _blocked(self.output)
        return max(given + self._weight() + output, output + self.output.nbytes)

    def to_input_bytes(self) -> int:
        """Of the gradient to the input: in oneDNN's layout, then in the input's, by way of a third where strided."""
        own = self.given.nbytes
        if self.is_strided and not self._is_grouped:
            copies = 3 if self.given.shape[1] > 1 else 2
            return max(self.output.nbytes + self._weight() + own, copies * own)
        given = _blocked(self.given)
        return max(_blocked(self.output) + self._weight() + given, given + own)

    def to_weight_bytes(self) -> int:
        narrower = self.weight.element_size() < FLOAT
        sums = self._weight() * FLOAT // self.weight.element_size() if narrower else 0
        # Copies of the input and of the output's gradient, from which the weight's is computed.
        block = NARROW if self._is_narrow and self.given.shape[1] > IMAGE_CHANNELS else None
        given = 0 if self._is_narrow and block is None else _blocked(self.given, block)
        read = given + _blocked(self.output, block)
        return max(read + self._weight() + sums, 2 * self.weight.nbytes)

    def _weight(self) -> int:
        outputs, inner = _blocked(self.weight, dimension=0), self.weight.shape[1]
        return outputs if self._is_grouped else outputs * _padded(inner) // inner

    @property
    def _is_grouped(self) -> bool:
        return self.weight.shape[1] < self.given.shape[1]

    @property
    def _is_narrow(self) -> bool:
        is_pointwise = self.weight[0, 0].numel() == 1
        return self.given.shape[1] < _register() and not is_pointwise and not self._is_grouped


def _blocked(tensor: torch.Tensor, block: int | None = None, dimension: int = 1) -> int:
    channels = tensor.shape[dimension]
    return tensor.nbytes // channels * _padded(channels, block)


def _padded(channels: int, block: int | None = None) -> int:
    block = block or _register()
    return -(-channels // block) * block


def _register() -> int:
    """Numbers of float32 in a vector register."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
