"""A decoder in plain torch that rounds as the operators do, one position after the other: what they are compared with.

Numbers that are rounded are float32, as in the operators; sums are float64, so that their order plays no part.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

from optigpu.ops.decode.cpu.cache import KEY_BLOCK
from optigpu.ops.decode.cpu.packing import unpack
from optigpu.ops.decode.program import Activation, Block, CacheKind, Matrix, Norm, Program, Sampling
from optigpu.ops.integers import INT4_LARGEST, INT4_LEAST, INT8_LARGEST
from optigpu.vocabulary import ReplicateError

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


class ReferenceDecoder:
    """What CpuDecoder and CudaDecoder do, for programs whose matrices packing.py has packed.

    `exact` leaves out what rounds activations, keys and values: what is left is the transformers model with the weights
    that the packed ones stand for.
    """

    def __init__(self, program: Program, kv: CacheKind = "bf16", exact: bool = False) -> None:
        self._program = program
        self._kv = kv
        self._exact = exact
        self._weights = {id(matrix): unpack(matrix).double() for matrix in _matrices(program)}
        self._capacity = 0
        self._sequences = 0
        self.length = 0
        self.logits = torch.empty(0)

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens."""
        program = self._program
        shape = (len(program.blocks), 2, sequences, capacity, program.kv_heads, program.head_size)
        self._cache = torch.zeros(shape, dtype=torch.float64)
        self._steps = torch.zeros(*shape[:-1], 1)
        self._table = program.rotary(capacity) if program.rotary else None
        self._capacity, self._sequences, self.length = capacity, sequences, 0

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits float32 [sequences, vocabulary] after the last of the tokens, int64 [sequences, count]."""
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != self._sequences:
            raise ValueError(f"extend needs int64 [{self._sequences}, count].")
        if tokens.shape[1] == 0 or not 0 <= int(tokens.min()) <= int(tokens.max()) < self._program.vocabulary:
            raise ValueError("extend needs tokens of the vocabulary.")
        for token in tokens.unbind(1):
            self.logits = self._step(token)
        return self.logits

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The most likely tokens int64 [sequences, steps] that follow the last ones, [sequences, 1]."""
        if sampling is not None and sampling.temperature:
            raise ValueError("The reference takes the most likely token.")
        found = []
        for _ in range(steps):
            tokens = self.extend(tokens).argmax(dim=1, keepdim=True)
            found.append(tokens)
        return torch.cat(found, dim=1)

    def _step(self, token: torch.Tensor) -> torch.Tensor:
        program = self._program
        if self.length >= min(self._capacity, program.context):
            raise ReplicateError(f"Position {self.length} is out of range.")
        x = self._weights[id(program.embedding)][token]
        if program.positions is not None:
            x = x + self._weights[id(program.positions)][self.length]
        x = x.float()
        for index, block in enumerate(program.blocks):
            x = self._block(x, index, block)
        self.length += 1
        return self._linear(norm_of(x, program.final), program.head)

    def _block(self, x: torch.Tensor, index: int, block: Block) -> torch.Tensor:
        attended = self._attention(norm_of(x, block.first), index, block)
        x = x + self._linear(attended, block.output)
        h = norm_of(x, block.second)
        activation = _ACTIVATIONS[self._program.activation]
        up = self._linear(h, block.up)
        inner = activation(up) if block.gate is None else activation(self._linear(h, block.gate)) * up
        return x + self._linear(inner, block.down)

    def _attention(self, x: torch.Tensor, index: int, block: Block) -> torch.Tensor:
        program, position = self._program, self.length
        found = torch.cat([self._linear(x, matrix) for matrix in block.qkv], dim=1)
        heads = found.view(self._sequences, -1, program.head_size)
        query, key, value = heads.split([program.heads, program.kv_heads, program.kv_heads], dim=1)
        cache = self._cache[index]
        if self._kv == "int4" and not self._exact:
            return self._attended_fours(self._turned(query), self._turned(key), value, index, block)
        cache[0, :, position] = self._kept(self._turned(key))
        cache[1, :, position] = self._kept(value)
        first = 0 if block.window is None else max(0, position + 1 - block.window)
        group = program.heads // program.kv_heads
        keys, values = cache[:, :, first : position + 1].repeat_interleave(group, dim=3)
        scores = torch.einsum("shd,sthd->sht", self._turned(query).double(), keys) * block.scale
        return torch.einsum("sht,sthd->shd", scores.softmax(dim=2), values).float().flatten(1)

    def _attended_fours(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: int, block: Block
    ) -> torch.Tensor:
        """By products of integers: a query in 8 bits, and the weights of each 16 tokens, times their values' scales."""
        program, position = self._program, self.length
        for which, heads in enumerate((key, value)):
            numbers, step = self._four_bits(rotated(heads))
            self._cache[index, which, :, position] = numbers.double()
            self._steps[index, which, :, position] = step
        first = 0 if block.window is None else max(0, position + 1 - block.window)
        begin, group = first // KEY_BLOCK * KEY_BLOCK, program.heads // program.kv_heads
        near = slice(begin, position + 1)
        keys, values = self._cache[index, :, :, near].repeat_interleave(group, dim=3)
        key_steps, value_steps = self._steps[index, :, :, near].repeat_interleave(group, dim=3).squeeze(4)
        numbers, step = self._eight_bits(rotated(query))
        scores = torch.einsum("shd,sthd->sht", numbers.double(), keys) * key_steps.transpose(1, 2) * step
        scores[:, :, : first - begin] = -torch.inf
        weights = (scores * block.scale).softmax(dim=2).float() * value_steps.transpose(1, 2)
        found = torch.zeros_like(query, dtype=torch.float64)
        for part, some in zip(weights.split(KEY_BLOCK, dim=2), values.split(KEY_BLOCK, dim=1), strict=True):
            numbers, step = self._eight_bits(part)
            found += torch.einsum("sht,sthd->shd", numbers.double(), some) * step
        return rotated(found.float()).flatten(1)

    def _eight_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return eight_bits(x)

    def _four_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return four_bits(x)

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings of [sequences, heads, head_size] at the present position."""
        if self._table is None:
            return heads
        cosines, sines = (table[self.length] for table in self._table)
        first, second = heads.chunk(2, dim=2)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=2)

    def _kept(self, heads: torch.Tensor) -> torch.Tensor:
        """What the cache has of [sequences, heads, head_size]."""
        if self._exact:
            return heads.double()
        if self._kv == "bf16":
            return heads.to(torch.bfloat16).double()
        numbers, step = eight_bits(heads)
        return (numbers.float() * step).double()

    def _linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """float32 [rows, outputs] of float32 [rows, inputs]."""
        weights = self._weights[id(matrix)]
        if self._exact or matrix.kind == "bf16":
            y = x.double() @ weights.T
        else:
            # A group's products are integers times its scales; float64 holds their sums exactly.
            numbers, step = eight_bits(x.unflatten(1, (-1, matrix.group)))
            y = (numbers.double() * step.double()).flatten(1) @ weights.T
        return (y if matrix.bias is None else y + matrix.bias[: matrix.outputs]).float()


def eight_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -127 to 127 and steps [..., 1], float32, of float32 [..., size]."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    numbers = torch.where(largest == 0, 0.0, x * (INT8_LARGEST / largest))
    return numbers.round(), largest / INT8_LARGEST


def four_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from -8 to 7 and steps [..., 1], float32; the largest in magnitude becomes -8, whatever its sign."""
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    numbers = torch.where(largest == 0, 0.0, x * (INT4_LEAST / largest))
    return numbers.round().clamp(INT4_LEAST, INT4_LARGEST), largest / INT4_LEAST


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform, which is its own inverse, of each of as many numbers as the largest power of two that
    divides the last dimension."""
    size = x.shape[-1]
    count, apart = size & -size, 1
    while apart < count:
        first, second = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        apart *= 2
    return x / math.sqrt(count)


def norm_of(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    if norm.kind == "layer":
        x = x - x.mean(dim=1, keepdim=True)
    x = x * (x.square().mean(dim=1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight
    return (x if norm.bias is None else x + norm.bias).float()


def _matrices(program: Program) -> list[Matrix]:
    found = [program.head, program.embedding]
    found += [program.positions] if program.positions else []
    for block in program.blocks:
        found += [*block.qkv, block.output, block.up, block.down]
        found += [block.gate] if block.gate else []
    return found
