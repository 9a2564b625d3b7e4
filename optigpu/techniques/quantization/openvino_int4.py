from dataclasses import replace
from typing import Literal

from pydantic import Field

from optigpu.models.described import Matrix, Part, StoredWeights
from optigpu.ops.layouts import openvino_int4_bytes, openvino_int8_bytes
from optigpu.techniques.base import DECODING, EngineOptions, Expected, OnCpuEngine, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind


class OpenVinoInt4(OnCpuEngine, WeightsTechnique):
    """Stores matrices as 4-bit numbers of which `group` of a row share a scale, 0 for a whole row.

    `scheme` "asym" adds an offset for each group. Without `all_layers` the embedding, the positions and the head stay
    in 8 bits, with an offset for each row; a head that is tied to the embedding is that matrix. `products` "int8"
    rounds activations in groups for the products; "float" widens the weights instead, and so does "int8" on a CPU
    without VNNI. A row that `group` does not divide has the largest power of 2 that does, from 32 on, or 8 bits. What
    else OpenVINO computes in is its own choice, as is its cache.
    """

    tasks = DECODING
    backends = ("openvino",)
    summary = "OpenVINO with weights of 4 bits, quantized by NNCF without calibration"
    citation = "Kozlov et al., Neural Network Compression Framework, 2020, arXiv:2002.08679"
    expected = (
        Expected(
            "arithmetic", "an eighth of fp32's bytes to read at each step of decoding, and their scales"
        ),
    )
    error_bound = 0.5
    trials = (Trial(), Trial({"scheme": "asym", "group": 32}), Trial({"all_layers": False}))

    name: Literal["openvino_int4"] = "openvino_int4"
    scheme: Literal["sym", "asym"] = "sym"
    group: Literal[0, 32, 64, 128, 256] = Field(
        128, description="Numbers of a row that share a scale; 0: all."
    )
    all_layers: bool = Field(
        True, description="Embedding, positions and head in 4 bits too; without it they stay in 8 bits."
    )
    products: Literal["int8", "float"] = "int8"

    def engine(self, options: EngineOptions) -> EngineOptions:
        return options.but(
            weights=f"int4_{self.scheme}",
            group=self.group,
            everywhere=self.all_layers,
            products=self.products,
        )

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.but(matrices=tuple(self._packed(matrix, weights.tied) for matrix in weights.matrices))

    def _packed(self, matrix: Matrix, tied: bool) -> Matrix:
        if matrix.part is Part.HEAD and tied:
            return matrix
        if matrix.part is Part.LINEAR or self.all_layers:
            offsets = self.scheme == "asym"
            size = openvino_int4_bytes(matrix.outputs, matrix.inner, group=self.group, offsets=offsets)
        else:
            size = openvino_int8_bytes(matrix.outputs, matrix.inner, offsets=True)
        return replace(matrix, bytes=size)
