"""Reads a .tflite file: its operators, its tensors and how they are quantized, and the multiply-accumulates of its
operators for one input. Needs neither TensorFlow nor LiteRT. The file may be damaged or hostile: every offset in it is
checked before it is followed. The numbers of the fields are those of tensorflow/compiler/mlir/lite/schema/schema.fbs,
version 3. Counted are the products of linear operators, as published figures count them. What adds, compares, pools or
scales costs time as well, and counts as 0."""

import math
import struct
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from optigpu.documents.manifest import OperatorCount
from optigpu.vocabulary import Frozen, SpecError

CUSTOM = 32
"""The number of every operator that has a name of its own instead."""


class Runs(Frozen):
    """The operators for which an engine has kernels, and where that is said."""

    source: str
    operators: frozenset[str]


class Operators(Frozen):
    """`codes` are the schema's numbers of the operators."""

    tflite_micro: Runs
    esp_nn: Runs
    codes: dict[str, int] = Field(min_length=1)


@lru_cache(maxsize=1)
def operators() -> Operators:
    text = files("optigpu.edge").joinpath("operators.toml").read_text(encoding="utf-8")
    return Operators.model_validate(tomllib.loads(text))


MOST_ITEMS = 2**16
"""The most items of a vector of tables or numbers. The bytes of a buffer are not copied item by item."""


class DamagedError(SpecError):
    """An offset or a length leads out of the file."""


class Table:
    """A table at a position of the data. Fields are asked for by their number in the schema."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - _number(data, "<i", position)
        self._fields_size = _number(data, "<H", self._fields)

    def number(self, field: int, form: str, default: int) -> int:
        """A field that is a number, by its form in `struct`."""
        place = self._place(field)
        return default if place is None else _number(self._data, form, place)

    def table(self, field: int) -> "Table | None":
        """A field that is a table; None if it is absent."""
        place = self._place(field)
        return None if place is None else Table(self._data, self._follow(place))

    def tables(self, field: int) -> "Iterator[Table]":
        start, length = self._vector(field, 4)
        for place in range(start, start + 4 * length, 4):
            yield Table(self._data, self._follow(place))

    def numbers(self, field: int, form: str) -> tuple[float, ...]:
        size = struct.calcsize(form)
        start, length = self._vector(field, size)
        return tuple(each for (each,) in struct.iter_unpack(form, self._data[start : start + size * length]))

    def bytes(self, field: int) -> bytes:
        """A field that is a vector of bytes, or text as its bytes."""
        start, length = self._vector(field, 1)
        return self._data[start : start + length]

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._fields_size:
            return None
        offset = _number(self._data, "<H", self._fields + entry)
        return self._position + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + _number(self._data, "<I", place)

    def _vector(self, field: int, size: int) -> tuple[int, int]:
        """Where its items begin, and how many there are."""
        place = self._place(field)
        if place is None:
            return 0, 0
        vector = self._follow(place)
        length = _number(self._data, "<I", vector)
        if vector + 4 + size * length > len(self._data) or (size > 1 and length > MOST_ITEMS):
            raise DamagedError("A list of it is longer than the file.")
        return vector + 4, length


def _number(data: bytes, form: str, place: int) -> int:
    if place < 0 or place + struct.calcsize(form) > len(data):
        raise DamagedError(f"It ends at byte {len(data)}, before what it refers to.")
    number: int = struct.unpack_from(form, data, place)[0]
    return number


IDENTIFIER = b"TFL3"
LARGEST_FILE = 512 * 2**20
MOST_GRAPHS = 64

_TYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 5: "string", 6: "bool", 7: "int16",
    8: "complex64", 9: "int8", 10: "float64", 17: "int4", 18: "bfloat16",
}  # fmt: skip
_BYTES = {"float32": 4, "float16": 2, "int32": 4, "uint8": 1, "int64": 8, "bool": 1, "int16": 2, "int8": 1}
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})


@dataclass(frozen=True)
class Tensor:
    """`constant_bytes` is 0 for what is computed. `scales` and `zero_points` have one entry, or one for each channel. A
    dimension that is known only when the model runs is -1 in `signature`, which is `shape` if all are known."""

    name: str
    shape: tuple[int, ...]
    signature: tuple[int, ...]
    dtype: str
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    constant_bytes: int

    @property
    def elements(self) -> int:
        """1 for a scalar."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What its numbers take, int4 as one byte each; 0 for text."""
        return self.elements * _BYTES.get(self.dtype, 1 if self.dtype == "int4" else 0)


@dataclass(frozen=True)
class Operator:
    """One operator of the graph. A missing optional input is None."""

    name: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """The main graph of a file; `graphs` counts all graphs, and `parameter_bytes` sums what all constants take."""

    operators: tuple[Operator, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameter_bytes: int
    graphs: int
    size: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that operators read or write, each once."""
        used = (each for operator in self.operators for each in (*operator.inputs, *operator.outputs))
        return tuple(dict.fromkeys(each for each in (*self.inputs, *used) if each is not None))


def read_tflite(path: Path) -> Model:
    """The model of a file. Raises SpecError, in one sentence, if it is none or is damaged."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise SpecError(f"{path} has {size} bytes, which no microcontroller holds.")
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    return parse_tflite(data, str(path))


def parse_tflite(data: bytes, what: str) -> Model:
    """The model of a file's bytes; `what` is its name in the error's sentence."""
    if data[4:8] != IDENTIFIER:
        raise SpecError(f"{what} is not a TensorFlow Lite model: it lacks the mark TFL3 at byte 4.")
    try:
        return _model(Table(data, _number(data, "<I", 0)), len(data))
    except (DamagedError, IndexError, OverflowError) as error:
        why = str(error) if isinstance(error, DamagedError) else "It refers to a part that it lacks."
        raise SpecError(f"{what} is a damaged TensorFlow Lite model. {why}") from None


def _model(model: Table, size: int) -> Model:
    names = [_operator_name(code) for code in model.tables(1)]
    graphs = list(model.tables(2))
    if len(graphs) > MOST_GRAPHS:
        raise DamagedError(f"It has {len(graphs)} graphs.")
    buffers = [len(buffer.bytes(0)) or buffer.number(2, "<Q", 0) for buffer in model.tables(4)]
    main = graphs[0]
    tensors = [_tensor(each, buffers) for each in main.tables(0)]
    used = {number for graph in graphs for each in graph.tables(0) if (number := each.number(2, "<I", 0))}
    return Model(
        operators=tuple(_operator(each, names, tensors) for each in main.tables(3)),
        inputs=tuple(_at(tensors, number) for number in main.numbers(1, "<i")),
        outputs=tuple(_at(tensors, number) for number in main.numbers(2, "<i")),
        parameter_bytes=sum(buffers[number] for number in used),
        graphs=len(graphs),
        size=size,
    )


def _operator_name(code: Table) -> str:
    """A builtin number above 127 stands in the newer field, and the larger of both fields counts."""
    number = max(code.number(0, "<b", 0), code.number(3, "<i", 0))
    if number == CUSTOM:
        return code.bytes(1).decode("ascii", errors="replace") or "CUSTOM"
    known = (name for name, known in operators().codes.items() if known == number)
    return next(known, f"BUILTIN_{number}")


def _tensor(tensor: Table, buffers: list[int]) -> Tensor:
    shape = tuple(map(int, tensor.numbers(0, "<i")))
    if any(each < 0 for each in shape):
        raise DamagedError("A tensor of it has a negative dimension.")
    number = tensor.number(1, "<b", 0)
    quantization = tensor.table(4)
    return Tensor(
        name=tensor.bytes(3).decode("utf-8", errors="replace"),
        shape=shape,
        signature=tuple(map(int, tensor.numbers(7, "<i"))) or shape,
        dtype=_TYPES.get(number, f"type{number}"),
        scales=quantization.numbers(2, "<f") if quantization else (),
        zero_points=tuple(map(int, quantization.numbers(3, "<q"))) if quantization else (),
        constant_bytes=buffers[tensor.number(2, "<I", 0)],
    )


def _operator(operator: Table, names: list[str], tensors: list[Tensor]) -> Operator:
    inputs = map(int, operator.numbers(1, "<i"))
    return Operator(
        name=names[operator.number(0, "<I", 0)],
        inputs=tuple(None if number < 0 else _at(tensors, number) for number in inputs),
        outputs=tuple(_at(tensors, number) for number in operator.numbers(2, "<i")),
    )


def _at(tensors: list[Tensor], number: float) -> Tensor:
    if number < 0:
        raise IndexError
    return tensors[int(number)]


def operator_counts(model: Model) -> tuple[OperatorCount, ...]:
    """Each kind of operator with its number and its MACs, those with the most MACs first."""
    counts: dict[str, list[int]] = defaultdict(list)
    for operator in model.operators:
        counts[operator.name].append(macs_of(operator))
    made = [OperatorCount(name=name, count=len(macs), macs=sum(macs)) for name, macs in counts.items()]
    return tuple(sorted(made, key=lambda each: (-each.macs, each.name)))


def macs_of(operator: Operator) -> int:
    """Multiply-accumulates of one operator. Raises SpecError if its tensors are not those of such an operator."""
    try:
        match operator.name:
            case "CONV_2D":  # filter (channels, height, width, channels of a group)
                _, height, width, depth = _input(operator, 1).shape
                return operator.outputs[0].elements * height * width * depth
            case "DEPTHWISE_CONV_2D":
                # filter (1, height, width, channels): a sum over the window of the own channel
                _, height, width, _ = _input(operator, 1).shape
                return operator.outputs[0].elements * height * width
            case "TRANSPOSE_CONV":
                # the output's shape, filter (channels out, height, width, channels in), tensor
                channels, height, width, _ = _input(operator, 1).shape
                return _input(operator, 2).elements * height * width * channels
            case "FULLY_CONNECTED":  # weights (outputs, inputs)
                _, depth = _input(operator, 1).shape
                return operator.outputs[0].elements * depth
            case "BATCH_MATMUL":
                # (..., rows, depth) times (..., depth, columns), either of them transposed or not
                left, rows = _input(operator, 0).shape, operator.outputs[0].shape[-2]
                return operator.outputs[0].elements * (left[-1] if left[-2] == rows else left[-2])
            case "UNIDIRECTIONAL_SEQUENCE_LSTM" | "SVDF":
                # each constant matrix once for each step; the batch is 1
                first = _input(operator, 0).shape
                steps = first[0] * first[1] if len(first) == 3 else 1
                constant = (each for each in operator.inputs if each and each.constant_bytes)
                return steps * sum(each.elements for each in constant if len(each.shape) == 2)
        return 0
    except (IndexError, ValueError):
        raise SpecError(
            f"{operator.name}: The operator's tensors do not have the shapes that it needs."
        ) from None


def _input(operator: Operator, number: int) -> Tensor:
    tensor = operator.inputs[number]
    if tensor is None:
        raise IndexError
    return tensor
