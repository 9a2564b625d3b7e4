from functools import partial
from typing import Literal

from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import nbits_bytes
from optigpu.techniques.base import ON_TEXT, EngineOptions, Expected, OnCpuEngine, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class OnnxInt4(OnCpuEngine, WeightsTechnique):
    """Stores every linear layer and the head in 4 bits, for the operator MatMulNBits.

    `group_size` inputs of an output share a float32 scale: 4 bits of a weight become 5, 4.5 or 4.25. `products` "int8"
    rounds activations to int8 by the group (accuracy_level 4), "float" widens the weights (accuracy_level 1). The
    embedding stays in float32: a lookup reads one row for each token.
    """

    tasks = ON_TEXT
    backends = ("onnxruntime",)
    summary = "ONNX Runtime's 4-bit weights in groups that share a scale"
    citation = "Microsoft, ONNX Runtime, operator MatMulNBits, 2023, github.com/microsoft/onnxruntime"
    expected = (
        Expected("arithmetic", "16% of the fp32 bytes of the layers that it replaces, in groups of 32"),
    )
    error_bound = 0.5
    trials = (Trial(), Trial({"group_size": 128, "products": "float"}))

    name: Literal["onnx_int4"] = "onnx_int4"
    group_size: Literal[32, 64, 128] = 32
    products: Literal["int8", "float"] = "int8"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights="int4", group=self.group_size, products=self.products)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.with_bytes(partial(nbits_bytes, bits=4, group=self.group_size), head=True)
