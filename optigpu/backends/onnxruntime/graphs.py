"""An ONNX graph that is written node by node; large constants go into a file beside it as they come.

A decoder of transformers is such a graph around GroupQueryAttention, ONNX Runtime's attention with a cache.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, save
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits
from torch.nn import Module
from transformers import PreTrainedModel

from optigpu.backends.onnxruntime import DATA, Format, Parts, parts_of
from optigpu.documents.facts import ModelFacts
from optigpu.models.families import NormKind
from optigpu.models.loading.expressed import DECODER, Fields, require_expressed
from optigpu.models.loading.load import loaded_facts
from optigpu.vocabulary import UnsupportedError

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


Floats = NDArray[np.float32]
Packed = NDArray[np.uint8]


def _tanh(graph: GraphWriter, values: str) -> str:
    return graph.node("Gelu", values, approximate="tanh")


def _silu(graph: GraphWriter, values: str) -> str:
    return graph.node("QuickGelu", values, domain=MICROSOFT, alpha=1.0)


ACTIVATIONS: Mapping[str, Callable[[GraphWriter, str], str]] = {
    "gelu": lambda graph, values: graph.node("Gelu", values),
    "gelu_new": _tanh,
    "gelu_pytorch_tanh": _tanh,
    "relu": lambda graph, values: graph.node("Relu", values),
    "silu": _silu,
    "swish": _silu,
}
"""ONNX Runtime's operators by transformers' names of the functions; QuickGelu is x * sigmoid(alpha * x)."""


def numbers(tensor: torch.Tensor) -> Floats:
    """A parameter as float32."""
    array: Floats = tensor.detach().to(torch.float32).numpy()
    return array


class Matrices:
    """Writes linear layers in one format."""

    def __init__(self, graph: GraphWriter, form: Format, *, conv1d: bool) -> None:
        """`conv1d`: the layers' weights are [inputs, outputs]."""
        self._graph, self._form, self._conv1d = graph, form, conv1d

    def linear(self, name: str, layers: Sequence[Module], values: str) -> str:
        """The product of layers that read the same inputs, with their outputs side by side."""
        weights = [numbers(layer.get_parameter("weight")) for layer in layers]
        weight = np.concatenate([each.T for each in weights] if self._conv1d else weights)
        biases = [layer.get_parameter("bias") for layer in layers if getattr(layer, "bias", None) is not None]
        if biases and len(biases) != len(layers):
            raise UnsupportedError(
                f"onnxruntime needs a bias on all parts of {name} or on none; ask for the backend torch."
            )
        joined = (
            self._graph.constant(f"{name}.bias", np.concatenate([*map(numbers, biases)])) if biases else ""
        )
        return self._product(name, weight, joined, values)

    def head(self, layer: Module, table: str, values: str, named: str) -> str:
        """The head, whose output is `named`; it reads the embedding's `table` where that is not empty."""
        if table:
            return self._graph.node("Gemm", values, table, named=named, transB=1)
        return self._product("head", numbers(layer.get_parameter("weight")), "", values, named)

    def _product(self, name: str, weight: Floats, bias: str, values: str, named: str = "") -> str:
        graph, form = self._graph, self._form
        outputs, inputs = weight.shape
        if form.bits == 32:
            matrix = graph.constant(f"{name}.weight", weight)
            return graph.node("Gemm", values, matrix, *([bias] if bias else []), named=named, transB=1)
        packed, scales = quantized(weight, form.bits, form.group)
        return graph.node(
            "MatMulNBits",
            values,
            graph.constant(f"{name}.numbers", packed),
            graph.constant(f"{name}.scales", scales),
            *(["", "", bias] if bias else []),
            domain=MICROSOFT,
            named=named,
            accuracy_level=form.accuracy_level,
            K=inputs,
            N=outputs,
            bits=form.bits,
            block_size=form.group,
        )


class Norms:
    """Writes norms of one kind."""

    def __init__(self, graph: GraphWriter, kind: NormKind) -> None:
        self._graph, self._kind = graph, kind

    def first(self, name: str, norm: Module, values: str) -> str:
        """The norm of what comes from the embedding."""
        kind = "LayerNormalization" if self._has_bias else "SimplifiedLayerNormalization"
        return self._graph.node(kind, values, *self._vectors(name, norm), axis=-1, epsilon=_epsilon(norm))

    def after(self, name: str, norm: Module, values: str, skipped: str) -> tuple[str, str]:
        """The norm of `values` + `skipped`, and that sum."""
        kind = "SkipLayerNormalization" if self._has_bias else "SkipSimplifiedLayerNormalization"
        normed, total = self._graph.node_with(
            (f"{name}.normed", "", "", f"{name}.sum"),
            kind,
            values,
            skipped,
            *self._vectors(name, norm),
            domain=MICROSOFT,
            epsilon=_epsilon(norm),
        )[::3]
        return normed, total

    @property
    def _has_bias(self) -> bool:
        return self._kind == "LayerNorm"

    def _vectors(self, name: str, norm: Module) -> list[str]:
        kinds = ("weight", "bias") if self._has_bias else ("weight",)
        return [self._graph.constant(f"{name}.{kind}", numbers(norm.get_parameter(kind))) for kind in kinds]


def _epsilon(norm: Module) -> float:
    """Under the name that torch has for it, or the one of transformers' RMS norms."""
    known = (getattr(norm, name, None) for name in ("eps", "variance_epsilon"))
    return float(next(each for each in known if each is not None))


def quantized(weight: Floats, bits: int, group: int) -> tuple[Packed, Floats]:
    """Numbers [outputs, groups, bytes of a group] and scales [outputs, groups] of a matrix [outputs, inputs].

    ONNX Runtime's own rounding, symmetric: the largest number of a group decides its scale, and the middle of the
    range stands for zero. The last group of a row is filled up with zeros.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    columns = np.zeros((groups * group, outputs), np.float32)
    columns[:inputs] = weight.T
    numbers = np.zeros((outputs, groups, group * bits // 8), np.uint8)
    scales = np.zeros((outputs, groups), np.float32)
    offsets = np.zeros((outputs, -(-groups * bits // 8)), np.uint8)
    quantize = quantize_matmul_4bits if bits == 4 else quantize_matmul_8bits
    quantize(numbers, columns, scales, offsets, group, outputs, inputs, True)
    return numbers, scales


EXPRESSED: Fields = DECODER | dict.fromkeys(("hidden_act", "activation_function"), tuple(ACTIVATIONS))
"""What a graph has of a configuration."""
_ROTATED_UNIT = 16
"""GroupQueryAttention rotates so many numbers of a head at once."""


def write_decoder(model: PreTrainedModel, graph: GraphWriter, form: Format) -> None:
    """Writes every node and constant.

    Raises UnsupportedError for a family or a field of its configuration that is not written.
    """
    parts = parts_of(model.config.model_type)
    require_expressed(model.config, EXPRESSED, "An ONNX graph")
    _DecoderWriter(model, parts, loaded_facts(model), graph, form).write()


class _DecoderWriter:
    """`_rows` is [rows, count, -1], which a reshape to separate rows reads, `_rotated` the tables of the rotation."""

    def __init__(
        self, model: PreTrainedModel, parts: Parts, facts: ModelFacts, graph: GraphWriter, form: Format
    ) -> None:
        self._model, self._parts, self._facts, self._graph, self._form = model, parts, facts, graph, form
        self._decoder = model.get_submodule(parts.decoder.path)
        self._matrices = Matrices(graph, form, conv1d=parts.conv1d)
        self._norms = Norms(graph, parts.decoder.norm_kind)
        self._known: dict[str, str] = {}

    def write(self) -> None:
        graph, decoder = self._graph, self._parts.decoder
        ids = graph.input("input_ids", TensorProto.INT64, ("rows", "count"))
        graph.input("seqlens_k", TensorProto.INT32, ("rows",))
        graph.input("total_length", TensorProto.INT32, (1,))
        rest = graph.constant("rest", np.array([-1], np.int64))
        self._rows = graph.node("Concat", graph.node("Shape", ids), rest, axis=0)
        self._rotated = self._rotary()
        blocks = [
            self._decoder.get_submodule(f"{decoder.blocks}.{number}") for number in range(self._facts.layers)
        ]
        table, values = self._embedded(ids)
        normed = self._norms.first("0.first", blocks[0].get_submodule(decoder.first), values)
        for number, block in enumerate(blocks):
            attended = self._attended(number, block, normed)
            second = block.get_submodule(decoder.second)
            normed, values = self._norms.after(f"{number}.second", second, attended, values)
            fed = self._fed(number, block, normed)
            if number + 1 < len(blocks):
                first = blocks[number + 1].get_submodule(decoder.first)
                normed, values = self._norms.after(f"{number + 1}.first", first, fed, values)
            else:
                self._finish(fed, values, table)

    def _flat(self, values: str, width: int) -> str:
        """[rows, count, width] as [tokens, width]."""
        name = f"flat_{width}"
        if name not in self._known:
            self._known[name] = self._graph.constant(name, np.array([-1, width], np.int64))
        return self._graph.node("Reshape", values, self._known[name])

    def _embedded(self, ids: str) -> tuple[str, str]:
        """The table of a head that is tied to it, or an empty name, and the embedded tokens."""
        graph, parts, tied = self._graph, self._parts.decoder, self._facts.tied_head
        rows = numbers(self._decoder.get_submodule(parts.embedding).get_parameter("weight"))
        is_shared = tied and self._form.bits == 32
        table = graph.constant("embedding", rows, looked_up=not is_shared)
        values = graph.node("Gather", table, ids)
        if parts.positions:
            places = numbers(self._decoder.get_submodule(parts.positions).get_parameter("weight"))
            table_of_places = graph.constant("places", places[-self._facts.longest :], looked_up=True)
            graph.input("positions", TensorProto.INT64, ("count",))
            values = graph.node("Add", values, graph.node("Gather", table_of_places, "positions"))
        return (table if is_shared else ""), self._flat(values, self._facts.hidden_size)

    def _rotary(self) -> tuple[str, ...]:
        """Cosines and sines of every position, as transformers computes them; nothing where positions are learned."""
        if self._parts.decoder.positions:
            return ()
        if self._facts.head_size % _ROTATED_UNIT:
            raise UnsupportedError(
                f"An ONNX graph does not express heads of {self._facts.head_size} numbers (head_dim, or hidden_size / "
                f"num_attention_heads) that are rotated, only multiples of {_ROTATED_UNIT}; ask for the backend torch."
            )
        rotary = self._decoder.get_submodule("rotary_emb")
        places = torch.arange(self._facts.longest)[None]
        halves = [each[0].chunk(2, dim=-1)[0] for each in rotary(torch.empty(0), places)]
        return tuple(
            self._graph.constant(name, numbers(half), looked_up=True)
            for name, half in zip(("cosines", "sines"), halves, strict=True)
        )

    def _attended(self, number: int, block: Module, normed: str) -> str:
        graph, facts, parts = self._graph, self._facts, self._parts.attention
        attention = block.get_submodule(parts.path)
        joined = self._matrices.linear(
            f"{number}.qkv", [attention.get_submodule(name) for name in parts.qkv], normed
        )
        shape = ("rows", facts.kv_heads, "capacity", facts.head_size)
        holder = {"config": self._model.config, "attention": attention}.get(parts.window_in or "")
        past, present = [], []
        for kind in ("key", "value"):
            past.append(graph.input(f"past_{kind}_{number}", TensorProto.FLOAT, shape))
            present.append(graph.output(f"present_{kind}_{number}", TensorProto.FLOAT, shape))
        attended, *_ = graph.node_with(
            (f"{number}.attended", *present),
            "GroupQueryAttention",
            graph.node("Reshape", joined, self._rows),
            "",
            "",
            *past,
            "seqlens_k",
            "total_length",
            *self._rotated,
            domain=MICROSOFT,
            num_heads=facts.heads,
            kv_num_heads=facts.kv_heads,
            scale=float(getattr(attention, "scaling", 0.0)),
            do_rotary=int(bool(self._rotated)),
            local_window_size=getattr(holder, "sliding_window", None) or -1,  # -1: it reaches back to all
        )
        flat = self._flat(attended, facts.heads * facts.head_size)
        return self._matrices.linear(f"{number}.output", [attention.get_submodule(parts.output)], flat)

    def _fed(self, number: int, block: Module, normed: str) -> str:
        parts = self._parts.mlp
        mlp = block.get_submodule(parts.path)

        def linear(kind: str, name: str, values: str) -> str:
            return self._matrices.linear(f"{number}.{kind}", [mlp.get_submodule(name)], values)

        activated = ACTIVATIONS[getattr(self._model.config, self._parts.activation)]
        up = linear("up", parts.up, normed)
        if parts.gate is None:
            return linear("down", parts.down, activated(self._graph, up))
        gate = activated(self._graph, linear("gate", parts.gate, normed))
        return linear("down", parts.down, self._graph.node("Mul", gate, up))

    def _finish(self, fed: str, values: str, table: str) -> None:
        """The norm and the head, of each row's last token alone."""
        graph, facts = self._graph, self._facts
        last = graph.constant("last", np.array(-1, np.int64))
        by_row = [graph.node("Reshape", each, self._rows) for each in (fed, values)]
        ends = [graph.node("Gather", each, last, axis=1) for each in by_row]
        norm = self._decoder.get_submodule(self._parts.decoder.final)
        normed, _ = self._norms.after("final", norm, *ends)
        logits = graph.output("logits", TensorProto.FLOAT, ("rows", facts.vocabulary))
        self._matrices.head(self._model.get_output_embeddings(), table, normed, logits)
