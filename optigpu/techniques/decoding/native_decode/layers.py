"""Layers with a decoder's packed weights, that take the place of a model's own, and how many bits each of them has.

The decoder reads the packed weights by itself. The layers hold them, so that a count of the model's bytes includes
them, and compute with unpacked ones when the model itself is called: slowly, unless these are kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.cpu.packing import pack, unpack
from optigpu.ops.decode.cuda.packing import joined, pack_for_cuda, rows_from, unpack_from_cuda
from optigpu.ops.decode.program import FEW_BITS, FinerRows, Matrix, WeightKind
from optigpu.ops.four_bits.compensated import Compensation, compensation
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.ops.layouts import DECODE_BITS, DECODE_TILE, decode_bytes, finer_bytes
from optigpu.surgery.bit_allocation import Candidate, Level, Stage
from optigpu.surgery.places import Place, become, weight_of
from optigpu.techniques.decoding.native_decode.prediction import RAISED
from optigpu.vocabulary import DeviceKind


class HoldsMatrix(torch.nn.Module):
    """Has the tensors of a packed matrix as buffers, and once they are `kept` the unpacked weights."""

    kind: WeightKind
    numbers: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    unit: torch.Tensor | None
    kept: torch.Tensor | None
    finer: "HeldFinerRows | None"

    def hold(self, matrix: Matrix) -> None:
        """Only once a module is initialized."""
        self.kind, self.group = matrix.kind, matrix.group
        self.outputs, self.inputs = matrix.outputs, matrix.inputs
        for name in ("numbers", "scale", "bias", "unit"):
            self.register_buffer(name, getattr(matrix, name))
        self.register_buffer("kept", None, persistent=False)
        self.finer = None if matrix.finer is None else HeldFinerRows(matrix.finer)

    @property
    def matrix(self) -> Matrix:
        about = (self.kind, self.outputs, self.inputs, self.group)
        finer = None if self.finer is None else FinerRows(self.finer.rows, self.finer.matrix)
        return Matrix(*about, self.numbers, self.scale, self.bias, self.unit, finer)

    def unpacked(self) -> torch.Tensor:
        """The weights, float32 [outputs, inputs], or in the dtype that they are kept in."""
        if self.kept is not None:
            return self.kept
        matrix = self.matrix
        return unpack(matrix) if matrix.numbers.device.type == "cpu" else unpack_from_cuda(matrix)


class HeldFinerRows(HoldsMatrix):
    """What is added to some rows of a matrix."""

    rows: torch.Tensor

    def __init__(self, finer: FinerRows) -> None:
        super().__init__()
        self.hold(finer.matrix)
        self.register_buffer("rows", finer.rows)


class DecodeLinear(HoldsMatrix):
    """y = x @ weight.T + bias with unpacked weights, in the dtype of x."""

    holds_quantized_weights = True

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.hold(matrix)

    def refine(
        self, rows: torch.Tensor, left: torch.Tensor, arena: Arena | None, known: Compensation | None
    ) -> None:
        """Adds what rounding has left of some rows, int64 [count] in ascending order. left: float32 [count, inputs]."""
        matrix = packed(left, None, self.kind, self.group, arena, known)
        self.finer = HeldFinerRows(FinerRows(kept(rows, rows.device, arena), matrix))

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What the decoder multiplies: many tokens at once go through bfloat16 on CUDA, where a CPU widens it."""
        quantized = () if self.kind == "bf16" else ("int8",)
        return quantized if self.numbers.device.type == "cpu" else (*quantized, "bfloat16")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[: self.outputs].to(x.dtype)
        return torch.nn.functional.linear(x, self.unpacked().to(x.dtype), bias)


class DecodeTable(HoldsMatrix):
    """Mixed into an embedding, which then looks up unpacked rows, in the dtype that its own had.

    `unused` rows come before those of the matrix: no token has them.
    """

    dtype: torch.dtype
    unused: int

    @property
    def weight(self) -> torch.Tensor:
        rows = self.unpacked().to(self.dtype)
        return torch.nn.functional.pad(rows, (0, 0, self.unused, 0)) if self.unused else rows


def exchange_table(embedding: torch.nn.Embedding, matrix: Matrix) -> None:
    """Makes the rows of a matrix those of an embedding, its last ones if it has more."""
    dtype, rows = embedding.weight.dtype, embedding.weight.shape[0]
    del embedding.weight
    table = become(embedding, DecodeTable)
    table.hold(matrix)
    table.dtype, table.unused = dtype, rows - matrix.outputs


def packed_table(weight: torch.Tensor, kind: WeightKind, group: int) -> Matrix:
    """Rows that are looked up, [rows, width], in memory of their own."""
    arena = Arena(_bytes(weight, kind, group)) if weight.device.type == "cpu" else None
    return packed(weight, None, kind, group, arena)


def candidates_of(
    places: Sequence[Place],
    kinds: Sequence[WeightKind],
    group: int,
    costs: Mapping[str, Sequence[float]],
    finer: Mapping[str, int],
) -> list[Candidate]:
    """Every layer with its kind and its bytes. Those that `costs` names may have the raised kinds as well.

    `costs` says by path what is lost with each of these kinds. The step that leaves out the most for each byte comes
    first. `finer` says by path how many rows of 3 to 6 bits are rounded twice.
    """
    found = []
    for place, kind in zip(places, kinds, strict=True):
        all_kinds = (kind, *RAISED[kind]) if place.path in costs else (kind,)
        levels = tuple(
            Level(
                each, DECODE_BITS[each], _bytes(weight_of(place.layer), each, group, finer.get(place.path, 0))
            )
            for each in all_kinds
        )
        lost = costs.get(place.path, ())
        gains = tuple(
            (before - after) / (larger.stored_bytes - smaller.stored_bytes)
            for (before, after), (smaller, larger) in zip(pairwise(lost), pairwise(levels), strict=True)
        )
        found.append(Candidate(place.path, levels, Stage.REST, gains=gains))
    return found


def compensation_of(moment: torch.Tensor | None) -> Compensation | None:
    """With products of the type that the moment's device is fastest in; None without a moment."""
    return None if moment is None else compensation(moment, product_type(moment.device))


def exchange_linears(
    places: Iterable[Place],
    kinds: Mapping[str, WeightKind],
    group: int,
    arena: Arena | None,
    moments: Mapping[str, torch.Tensor],
) -> None:
    """Replaces each linear layer by one with packed weights; on a CPU these are allocated in the arena.

    `kinds` has each layer's by its path. Those of 3 to 6 bits whose inputs' `moments` are known have their errors make
    up for each other.
    """
    last: torch.Tensor | None = None  # queries, keys and values have the same inputs
    known = None
    for place in places:
        moment = moments.get(place.path)
        if moment is not last:
            last, known = moment, compensation_of(moment)
        weight, bias = weight_of(place.layer), place.layer.bias
        place.put(DecodeLinear(packed(weight, bias, kinds[place.path], group, arena, known)))


def kept(tensor: torch.Tensor, device: torch.device, arena: Arena | None) -> torch.Tensor:
    """A copy on a device, or in the arena where there is one."""
    if arena is None:
        return tensor.to(device, copy=True)
    return arena.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def joined_matrices(layers: Sequence[DecodeLinear]) -> tuple[Matrix, ...]:
    """The matrices of DecodeLinears whose outputs follow one another, in as few as their operator wants.

    On CUDA, where fewer are faster, the layers then hold parts of what was joined, so that nothing is there twice.
    """
    if layers[0].numbers.device.type == "cpu":
        return tuple(layer.matrix for layer in layers)
    matrices = joined([layer.matrix for layer in layers])
    share(layers, matrices)
    return matrices


def rows_of(matrix: Matrix, first: int, last: int) -> Matrix:
    """The outputs [first, last) of a matrix; on a CPU multiples of DECODE_TILE."""
    unit = DECODE_TILE if matrix.numbers.device.type == "cpu" else 1
    rows = slice(first // unit, last // unit)
    bias = None if matrix.bias is None else matrix.bias[first:last]
    return replace(rows_from(matrix, rows, last - first), bias=bias)


def share(layers: Sequence[DecodeLinear], matrices: Sequence[Matrix]) -> None:
    """Has each of the layers hold its part of matrices for CUDA, whose outputs are theirs one after the other."""
    left = iter(matrices)
    matrix, start = next(left), 0
    for layer in layers:
        if start == matrix.outputs:
            matrix, start = next(left), 0
        rows = slice(start, start + layer.outputs)
        layer.hold(rows_from(matrix, rows, layer.outputs))
        start = rows.stop


def _bytes(weight: torch.Tensor, kind: WeightKind, group: int, finer: int = 0) -> int:
    """Bytes of a packed matrix with its padding, without its bias; of 3 to 6 bits, with so many finer rows."""
    outputs, inputs = weight.shape
    device = DeviceKind(weight.device.type)
    more = finer_bytes(finer, inputs, device, kind=kind, group=group) if kind in FEW_BITS else 0
    return more + decode_bytes(outputs, inputs, device, kind=kind, group=group)


def packed(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: WeightKind,
    group: int,
    arena: Arena | None = None,
    known: Compensation | None = None,
) -> Matrix:
    """For the operator of the weight's device."""
    if weight.device.type == "cpu":
        return pack(weight, bias, kind, group, arena, known)
    return pack_for_cuda(weight, bias, kind, group, known)
