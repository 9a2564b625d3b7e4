"""What a convolution holds on a CPU while it runs, told from shapes: oneDNN computes on copies in a layout of its own.

That layout has blocks of as many channels as a vector register has float32 numbers, the last block padded. Few channels
are read as they are, the gradient to the input of a strided convolution is made with its channels last, and a weight's
gradient in bfloat16 is summed in float32. What a thread has for itself is not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

IMAGE_CHANNELS = 3
NARROW = 8
"""Channels of a block where an input has fewer than a register takes."""
FLOAT = 4
_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]


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
        return makes + _columns(given, weight, output)
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
        """Of the weight's gradient."""
        narrower = self.weight.element_size() < FLOAT
        sums = self._weight() * FLOAT // self.weight.element_size() if narrower else 0
        return max(sum(self._read()) + self._weight() + sums, 2 * self.weight.nbytes)

    def _read(self) -> tuple[int, int]:
        """Copies of the input and of the output's gradient, from which the weight's is computed."""
        if self._is_narrow and self.given.shape[1] > IMAGE_CHANNELS:
            return _blocked(self.given, NARROW), _blocked(self.output, NARROW)
        return 0 if self._is_narrow else _blocked(self.given), _blocked(self.output)

    def _weight(self) -> int:
        outputs = _blocked(self.weight, dimension=0)
        return (
            outputs if self._is_grouped else outputs * _padded(self.weight.shape[1]) // self.weight.shape[1]
        )

    @property
    def _is_grouped(self) -> bool:
        return self.weight.shape[1] < self.given.shape[1]

    @property
    def _is_narrow(self) -> bool:
        is_pointwise = self.weight[0, 0].numel() == 1
        return self.given.shape[1] < _register() and not is_pointwise and not self._is_grouped


def _columns(given: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """The patches of the input as the columns of a matrix; a 1x1 convolution reads the input itself."""
    if weight[0, 0].numel() == 1:
        return 0
    rows, channels = given.shape[:2]
    return rows * channels * weight[0, 0].numel() * output[0, 0].numel() * given.element_size()


def _blocked(tensor: torch.Tensor, block: int | None = None, dimension: int = 1) -> int:
    """Bytes of a copy whose channels are padded to whole blocks."""
    channels = tensor.shape[dimension]
    return tensor.nbytes // channels * _padded(channels, block)


def _padded(channels: int, block: int | None = None) -> int:
    block = block or _register()
    return -(-channels // block) * block


def _register() -> int:
    """Numbers of float32 in a vector register."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
