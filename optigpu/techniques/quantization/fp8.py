from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, needs_capability
from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import fp8_bytes
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind

NEEDED_CAPABILITY = (8, 9)
"""Ada and Hopper."""


class Fp8(WeightsTechnique):
    """Replaces every linear layer by one with e4m3 weights, one scale per output, that rounds its activations to e4m3.

    Activations get one scale for each token as they come. A tied embedding keeps its dtype, as in int8_weight_only.
    """

    summary = "e4m3 weights and activations with scales for each output and token, on fp8 tensor cores"
    citation = "Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433"
    expected = (
        Expected("arithmetic", "a quarter of the fp32 bytes of the layers that it replaces"),
        Expected("literature", "twice the matrix rate of bf16", "NVIDIA H100 Tensor Core GPU data sheet"),
        Expected("aim", "decoding gains less, since small products are bound by launches"),
    )
    abilities = (Ability.FP8,)
    error_bound = 0.3
    trials = (Trial(), Trial(beside=("bf16",), devices=(DeviceKind.CUDA,)))
    only_when_asked = True  # int8_weight_only needs no rounded activations for the same bytes

    name: Literal["fp8"] = "fp8"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return needs_capability(environment, NEEDED_CAPABILITY, "fp8 matrix products")

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.with_bytes(fp8_bytes, head=True)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place. Raises UnsupportedError as `checked_places` does."""
        from optigpu.surgery.fp8_layers import Fp8Linear
        from optigpu.surgery.places import checked_places, exchange

        places = checked_places(model, self.name)
        exchange(places, Fp8Linear.of)
        notes.record(fp8_layers=len(places), fp8_backend="torch._scaled_mm")
