from dataclasses import replace
from typing import Literal

from optigpu.models.described import Part, StoredWeights
from optigpu.ops.layouts import openvino_int8_bytes
from optigpu.techniques.base import DECODING, EngineOptions, Expected, OnCpuEngine, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class OpenVinoInt8(OnCpuEngine, WeightsTechnique):
    """Stores every matrix as int8 with a scale for each output, the embedding, the positions and the head too.

    `scheme` "asym" adds an offset for each output. `products` "int8" rounds activations in groups for the products;
    "float" widens the weights instead, and so does "int8" on a CPU without VNNI. What else OpenVINO computes in is its
    own choice, as is its cache.
    """

    tasks = DECODING
    backends = ("openvino",)
    summary = "OpenVINO with weights of 8 bits, quantized by NNCF without calibration"
    citation = "Kozlov et al., Neural Network Compression Framework, 2020, arXiv:2002.08679"
    expected = (
        Expected(
            "arithmetic",
            "a quarter of fp32's bytes to read at each step of decoding, for nearly the same logits",
        ),
    )
    error_bound = 0.1
    trials = (Trial(), Trial({"scheme": "sym"}), Trial({"products": "float"}))

    name: Literal["openvino_int8"] = "openvino_int8"
    scheme: Literal["asym", "sym"] = "asym"
    products: Literal["int8", "float"] = "int8"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(weights=f"int8_{self.scheme}", products=self.products)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        offsets = self.scheme == "asym"
        matrices = (
            matrix
            if matrix.part is Part.HEAD and weights.tied
            else replace(matrix, bytes=openvino_int8_bytes(matrix.outputs, matrix.inner, offsets=offsets))
            for matrix in weights.matrices
        )
        return weights.but(matrices=tuple(matrices))
