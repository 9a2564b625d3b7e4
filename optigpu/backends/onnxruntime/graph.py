"""An ONNX graph that is written node by node; large constants go into a file beside it as they come."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, save

from optigpu.backends.onnxruntime.formats import DATA

PACKED = ("int8", "uint8")
"""What quantized weights are stored in: 4-bit numbers two in a byte."""
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_OPSET, _IR = 20, 10
_PAGE = 4096
"""Constants begin at pages of the file, so that ONNX Runtime can map them into memory."""
_LARGE = 1024
"""Bytes from which on a constant lies in the file beside the graph."""


@dataclass
class Written:
    """The sums over constants: all bytes, those that every step reads, and one token's rows of tables.

    `types` counts them by their type. `packed_bytes` are those of integers of 8 bits and fewer.
    """

    bytes: int = 0
    streamed_bytes: int = 0
    row_bytes: int = 0
    types: Counter[str] = field(default_factory=Counter)
    packed_bytes: int = 0


class GraphWriter:
    """Nodes are named by their kind and number, and what they give by the node."""

    def __init__(self, data: BinaryIO) -> None:
        self.written = Written()
        self._data = data
        self._nodes: list[NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []

    def input(self, name: str, kind: int, shape: Sequence[str | int]) -> str:
        """An input of the graph; `kind` is one of TensorProto's types."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def output(self, name: str, kind: int, shape: Sequence[str | int]) -> str:
        """An output of the graph; the node that gives it is told the name."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def constant(self, name: str, array: NDArray[np.generic], *, looked_up: bool = False) -> str:
        """Writes an array; of one that is `looked_up` a token reads one row."""
        array = np.asarray(array, order="C")
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
        if array.nbytes < _LARGE:
            tensor.raw_data = array.tobytes()
        else:
            self._data.write(b"\0" * (-self._data.tell() % _PAGE))
            place = {"location": DATA, "offset": self._data.tell(), "length": array.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            tensor.data_location = TensorProto.EXTERNAL
            self._data.write(array.data)
        self._initializers.append(tensor)
        written = self.written
        written.bytes += array.nbytes
        written.types[str(array.dtype)] += 1
        if looked_up:
            written.row_bytes += array.nbytes // array.shape[0]
        else:
            written.streamed_bytes += array.nbytes
        if str(array.dtype) in PACKED:
            written.packed_bytes += array.nbytes
        return name

    def node(
        self, kind: str, *inputs: str, domain: str = "", named: str = "", **attributes: float | int | str
    ) -> str:
        """A node with one output, whose name is returned."""
        output = named or f"{kind}_{len(self._nodes)}"
        self.node_with((output,), kind, *inputs, domain=domain, **attributes)
        return output

    def node_with(
        self,
        outputs: Sequence[str],
        kind: str,
        *inputs: str,
        domain: str = "",
        **attributes: float | int | str,
    ) -> Sequence[str]:
        """A node whose outputs have these names; an empty one is not wanted."""
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(kind, list(inputs), list(outputs), name=name, domain=domain, **attributes)
        )
        return outputs

    def save(self, path: Path) -> None:
        """Writes the graph itself; the constants beside it are written by then."""
        graph = helper.make_graph(self._nodes, "model", self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
        save(model, str(path))
