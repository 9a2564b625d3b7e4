"""Layers with a decoder's packed weights, that take the place of a model's own, and how many bits each of them has.

The decoder reads the packed weights by itself. The layers hold them, so that a count of the model's bytes includes
them, and compute with them, slowly, when the model itself is called.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.cuda.packing import joined, pack_for_cuda, unpack_from_cuda
from optigpu.ops.decode.program import Matrix, WeightKind
from optigpu.ops.four_bits.compensated import Compensation, compensation
from optigpu.ops.layouts import DECODE_BITS, decode_bytes
from optigpu.surgery.bit_allocation import Candidate, Level, Stage
from optigpu.surgery.places import LinearLayer, Place, weight_of
from optigpu.vocabulary import DeviceKind


class DecodeLinear(torch.nn.Module):
    """y = x @ weight.T + bias with unpacked weights, in the dtype of x."""

    holds_quantized_weights = True
    numbers: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    unit: torch.Tensor | None

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.kind, self.group = matrix.kind, matrix.group
        self.outputs, self.inputs = matrix.outputs, matrix.inputs
        self.register_buffer("numbers", matrix.numbers)
        self.register_buffer("scale", matrix.scale)
        self.register_buffer("bias", matrix.bias)
        self.register_buffer("unit", matrix.unit)

    @classmethod
    def of(
        cls,
        layer: LinearLayer,
        kind: WeightKind,
        group: int,
        arena: Arena | None,
        known: Compensation | None,
    ) -> Self:
        """The packed layer of a Linear or a Conv1D."""
        return cls(_pack(weight_of(layer), layer.bias, kind, group, arena, known))

    @property
    def matrix(self) -> Matrix:
        about = (self.kind, self.outputs, self.inputs, self.group)
        return Matrix(*about, self.numbers, self.scale, self.bias, self.unit)

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What the decoder multiplies: many tokens at once go through bfloat16 on CUDA, where a CPU widens it."""
        quantized = () if self.kind == "bf16" else ("int8",)
        return quantized if self.numbers.device.type == "cpu" else (*quantized, "bfloat16")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[: self.outputs].to(x.dtype)
        return torch.nn.functional.linear(x, _unpack(self.matrix).to(x.dtype), bias)


class DecodeEmbedding(torch.nn.Embedding):
    """Row i of a bfloat16 table, in the dtype of the embedding that it was made of."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        # A buffer: a model takes the dtype of its first parameter for its own.
        del self.weight
        self.register_buffer("weight", embedding.weight.detach().to(torch.bfloat16).contiguous())
        self.dtype = embedding.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).to(self.dtype)


def candidates_of(
    places: Sequence[Place], kinds: Sequence[WeightKind], group: int, costs: Mapping[str, float]
) -> list[Candidate]:
    """Every layer with its kind and its bytes. Those of 4 bits that `costs` names may have 8 as well.

    `costs` says by path what is lost with 4 bits and not with 8. The layer that loses the most for each byte is raised
    first.
    """
    found = []
    for place, kind in zip(places, kinds, strict=True):
        both: tuple[WeightKind, ...] = (kind, "w8") if place.path in costs else (kind,)
        levels = tuple(
            Level(each, DECODE_BITS[each], _bytes(weight_of(place.layer), each, group)) for each in both
        )
        more = levels[-1].stored_bytes - levels[0].stored_bytes
        found.append(Candidate(place.path, levels, Stage.REST, costs[place.path] / more if more else 0.0))
    return found


def exchange_linears(
    places: Sequence[Place],
    kinds: Mapping[str, WeightKind],
    group: int,
    arena: Arena | None,
    moments: Mapping[str, torch.Tensor],
) -> None:
    """Replaces each linear layer by one with packed weights; on a CPU these are allocated in the arena.

    `kinds` has each layer's by its path. Those of 4 bits whose inputs' `moments` are known have their errors make up
    for each other.
    """
    last: torch.Tensor | None = None  # queries, keys and values have the same inputs
    known = None
    for place in places:
        moment = moments.get(place.path)
        if moment is not last:
            last, known = moment, None if moment is None else compensation(moment)
        place.put(DecodeLinear.of(place.layer, kinds[place.path], group, arena, known))


def packed_tensors(model: PreTrainedModel, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors of the DecodeLinears at some paths, by path and name."""
    return {
        f"{path}.{name}": tensor
        for path in paths
        for name, tensor in model.get_submodule(path).named_buffers()
    }


def restore_linears(
    places: Sequence[Place],
    kinds: Mapping[str, WeightKind],
    group: int,
    arena: Arena | None,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Like `exchange_linears`, with tensors from `packed_tensors`."""
    for place in places:
        weight, kind = weight_of(place.layer), kinds[place.path]
        found: dict[str, Any] = {}
        for name in ("numbers", "scale", "unit", "bias"):
            tensor = tensors.get(f"{place.path}.{name}")
            if tensor is None:
                found[name] = None
            elif arena is None or name == "bias":
                found[name] = tensor.to(weight.device, copy=True)
            else:
                found[name] = arena.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        outputs, inputs = weight.shape
        matrix = Matrix(kind, outputs, inputs, 0 if kind == "bf16" else group, **found)
        place.put(DecodeLinear(matrix))


def joined_matrices(layers: Sequence[DecodeLinear]) -> tuple[Matrix, ...]:
    """The matrices of DecodeLinears whose outputs follow one another, in as few as their operator wants.

    On CUDA, where fewer are faster, the layers then hold parts of what was joined, so that nothing is there twice.
    """
    if layers[0].numbers.device.type == "cpu":
        return tuple(layer.matrix for layer in layers)
    matrices = joined([layer.matrix for layer in layers])
    share(layers, matrices)
    return matrices


def share(layers: Sequence[DecodeLinear], matrices: Sequence[Matrix]) -> None:
    """Has each of the layers hold its part of matrices for CUDA, whose outputs are theirs one after the other."""
    left = iter(matrices)
    matrix, start = next(left), 0
    for layer in layers:
        if start == matrix.outputs:
            matrix, start = next(left), 0
        rows = slice(start, start + layer.outputs)
        layer.numbers = matrix.numbers[rows]
        layer.scale = None if matrix.scale is None else matrix.scale[rows]
        layer.unit = None if matrix.unit is None else matrix.unit[rows]
        layer.bias = None if matrix.bias is None else matrix.bias[rows]
        start = rows.stop


def _bytes(weight: torch.Tensor, kind: WeightKind, group: int) -> int:
    """Bytes of a packed matrix with its padding, without its bias."""
    outputs, inputs = weight.shape
    return decode_bytes(outputs, inputs, DeviceKind(weight.device.type), kind=kind, group=group)


def _pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: WeightKind,
    group: int,
    arena: Arena | None,
    known: Compensation | None,
) -> Matrix:
    if weight.device.type == "cpu":
        return pack(weight, bias, kind, group, arena, known)
    return pack_for_cuda(weight, bias, kind, group, known)


def _unpack(matrix: Matrix) -> torch.Tensor:
    return unpack(matrix) if matrix.numbers.device.type == "cpu" else unpack_from_cuda(matrix)
