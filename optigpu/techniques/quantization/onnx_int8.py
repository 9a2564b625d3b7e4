from functools import partial
from typing import Literal

from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import nbits_bytes
from optigpu.techniques.base import ON_TEXT, EngineOptions, Expected, OnCpuEngine, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class OnnxInt8(OnCpuEngine, WeightsTechnique):
    """Stores every linear layer and the head as int8, for the operator MatMulNBits.

    `group_size` inputs of an output share a float32 scale. Activations are rounded to int8 by the group
    (accuracy_level 4): the operator has no fast products of 8-bit weights with floats. The embedding stays in float32.
    """

    tasks = ON_TEXT
    backends = ("onnxruntime",)
    summary = "ONNX Runtime's 8-bit weights in groups that share a scale"
    citation = "Microsoft, ONNX Runtime, operator MatMulNBits, 2023, github.com/microsoft/onnxruntime"
    expected = (
        Expected("arithmetic", "28% of the fp32 bytes of the layers that it replaces, in groups of 32"),
    )
    error_bound = 0.1
    trials = (Trial(), Trial({"group_size": 128}))

    name: Literal["onnx_int8"] = "onnx_int8"
    group_size: Literal[32, 64, 128] = 32

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights="int8", group=self.group_size, products="int8")

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.with_bytes(partial(nbits_bytes, bits=8, group=self.group_size), head=True)
