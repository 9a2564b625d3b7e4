"""What a model in OpenVINO's format holds: the types and bytes of its constants, read from the graph's XML.

Loads neither torch nor OpenVINO.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

GRAPH = "model.xml"
"""Beside it lies model.bin with the constants."""
NOTES = "optigpu"
"""Under this name a graph holds what is known of the model it was made of."""
_ON_THE_WAY = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose")
"""What widens a quantized constant and gives it its shape."""
_BITS = {"u8": 8, "i8": 8, "u4": 4, "i4": 4}
"""Of a quantized weight."""
_COUNTED = ("f32", "f16", "bf16", *_BITS)
"""The types of weights and their scales, as the graph names them; other constants are shapes and indices."""

Readers = Mapping[int, list[tuple[int, int]]]
"""Who reads each layer's output: their ids and ports."""


@dataclass(frozen=True)
class Constant:
    """Numbers at `offset` of the file of constants; `rows` is their outermost dimension.

    `looked_up` says that a step reads some of the rows alone, `is_zero` that it is subtracted from quantized numbers.
    """

    offset: int
    type: str
    bytes: int
    rows: int
    looked_up: bool
    is_zero: bool


@dataclass(frozen=True)
class Contents:
    """The constants of a model, and what was noted of the model when it was converted."""

    constants: tuple[Constant, ...]
    notes: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Of all constants."""
        return sum(constant.bytes for constant in self.constants)

    @property
    def figures(self) -> Mapping[str, float | None]:
        """The fields of WeightFacts that a graph knows; `quantized` is None where no weight is."""
        weights = (each for each in self.constants if each.type in _BITS and not each.is_zero)
        packed, parameters = (
            sum(8 * each.bytes // _BITS[each.type] for each in weights),
            self.notes["parameters"],
        )
        quantized = packed / parameters if packed else None
        return {"bytes": self.bytes, "parameters": parameters, "quantized": quantized}

    @property
    def row_bytes(self) -> int:
        """What one token reads of the tables that are only looked up."""
        return sum(each.bytes // each.rows for each in self.constants if each.looked_up)

    @property
    def streamed_bytes(self) -> int:
        """What every step reads wholly."""
        return sum(each.bytes for each in self.constants if not each.looked_up)

    @property
    def is_quantized(self) -> bool:
        """Whether some are numbers of 8 bits and fewer."""
        return any(each.type in _BITS for each in self.constants)


def contents_of(folder: Path) -> Contents:
    """Reads a graph. Raises ValueError for one that is none, and where the file of constants is too short for it."""
    try:
        root = ElementTree.parse(folder / GRAPH).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{GRAPH} is not a graph: {error}") from error
    layers = {int(layer.attrib["id"]): layer for layer in root.iterfind("layers/layer")}
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in root.iterfind(
        "edges/edge"
    ):  # ports are numbered through a layer's inputs and then its outputs
        reader = int(edge.attrib["to-layer"]), int(edge.attrib["to-port"])
        readers[int(edge.attrib["from-layer"])].append(reader)
    found: dict[int, Constant] = {}
    for number, layer in layers.items():
        if layer.attrib["type"] == "Const":
            looked_up = _ends(number, layers, readers) == {("Gather", 0)}  # port 0 takes the table
            constant = _constant(layer, looked_up, _is_zero(number, layers, readers))
            known = found.get(constant.offset)
            if known is None or known.looked_up:  # what anyone reads wholly is read wholly
                found[constant.offset] = constant
    constants = tuple(each for each in found.values() if each.type in _COUNTED)
    binary = (folder / GRAPH).with_suffix(".bin")
    size, end = binary.stat().st_size, max((each.offset + each.bytes for each in constants), default=0)
    if size < end:
        raise ValueError(f"{binary.name} has {size} bytes, and the graph needs {end}")
    noted = root.find(f"rt_info/{NOTES}")
    notes = {} if noted is None else {note.tag: int(note.attrib["value"]) for note in noted}
    return Contents(constants, notes)


def _constant(layer: Element, looked_up: bool, is_zero: bool) -> Constant:
    data = layer.find("data")
    assert data is not None, "the format has one in each constant"
    shape = [int(size) for size in data.attrib["shape"].split(",") if size.strip()]
    return Constant(
        offset=int(data.attrib["offset"]),
        type=data.attrib["element_type"],
        bytes=int(data.attrib["size"]),
        rows=shape[0] if shape and 0 not in shape else 1,
        looked_up=looked_up,
        is_zero=is_zero,
    )


def _is_zero(number: int, layers: Mapping[int, Element], readers: Readers) -> bool:
    """Whether a constant, as it is or converted, is subtracted from another."""
    direct = readers.get(number, [])
    converted = [reader for reader, _ in direct if layers[reader].attrib["type"] == "Convert"]
    read = [*direct, *(each for reader in converted for each in readers.get(reader, []))]
    return any(layers[reader].attrib["type"] == "Subtract" and port == 1 for reader, port in read)


def _ends(number: int, layers: Mapping[int, Element], readers: Readers) -> set[tuple[str, int]]:
    """The kinds and ports of the layers that compute with a constant."""
    ends: set[tuple[str, int]] = set()
    seen: set[int] = set()
    waiting = [number]
    while waiting:
        for reader, port in readers.get(waiting.pop(), []):
            kind = layers[reader].attrib["type"]
            if kind not in _ON_THE_WAY:
                ends.add((kind, port))
            elif reader not in seen:
                seen.add(reader)
                waiting.append(reader)
    return ends
