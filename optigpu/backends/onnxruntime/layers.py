"""The layers of a decoder as nodes of a graph. Activations are [tokens, width], one row after another.

Matrices as MatMulNBits reads them: whole numbers of 4 or 8 bits in groups that share a scale.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits
from torch.nn import Module

from optigpu.backends.onnxruntime.formats import Format
from optigpu.backends.onnxruntime.graph import MICROSOFT, GraphWriter
from optigpu.models.families import NormKind
from optigpu.vocabulary import UnsupportedError

Floats = NDArray[np.float32]
Activation = Callable[[GraphWriter, str], str]
Packed = NDArray[np.uint8]


def _tanh(graph: GraphWriter, values: str) -> str:
    return graph.node("Gelu", values, approximate="tanh")


def _silu(graph: GraphWriter, values: str) -> str:
    return graph.node("QuickGelu", values, domain=MICROSOFT, alpha=1.0)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": lambda graph, values: graph.node("Gelu", values),
        "gelu_new": _tanh,
        "gelu_pytorch_tanh": _tanh,
        "relu": lambda graph, values: graph.node("Relu", values),
        "silu": _silu,
        "swish": _silu,
    }
)
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
        weight = np.concatenate([self._rows(layer) for layer in layers])
        biases = [layer.get_parameter("bias") for layer in layers if getattr(layer, "bias", None) is not None]
        if biases and len(biases) != len(layers):
            raise UnsupportedError(
                f"onnxruntime needs a bias on all parts of {name} or on none; ask for the backend torch."
            )
        bias = (
            self._graph.constant(f"{name}.bias", np.concatenate(list(map(numbers, biases)))) if biases else ""
        )
        return self._product(name, weight, bias, values)

    def head(self, layer: Module, table: str, values: str, named: str) -> str:
        """The head, whose output is `named`; it reads the embedding's `table` where that is not empty."""
        if table:
            return self._graph.node("Gemm", values, table, named=named, transB=1)
        return self._product("head", numbers(layer.get_parameter("weight")), "", values, named)

    def _rows(self, layer: Module) -> Floats:
        weight = numbers(layer.get_parameter("weight"))
        return weight.T if self._conv1d else weight

    def _product(self, name: str, weight: Floats, bias: str, values: str, named: str = "") -> str:
        graph, form = self._graph, self._form
        outputs, inputs = weight.shape
        if form.is_float:
            matrix = graph.constant(f"{name}.weight", weight)
            return graph.node("Gemm", values, matrix, *([bias] if bias else []), named=named, transB=1)
        packed, scales = quantized(weight, form.bits, form.group)
        stored = graph.constant(f"{name}.numbers", packed), graph.constant(f"{name}.scales", scales)
        shape = {"K": inputs, "N": outputs, "bits": form.bits, "block_size": form.group}
        return graph.node(
            "MatMulNBits",
            values,
            *stored,
            *(["", "", bias] if bias else []),
            domain=MICROSOFT,
            named=named,
            accuracy_level=form.accuracy_level,
            **shape,
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
