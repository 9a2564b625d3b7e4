from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, needs_capability
from optigpu.models.described import StoredWeights
from optigpu.ops.layouts import int8_dynamic_bytes
from optigpu.techniques.base import Expected, Model, Notes, Trial, WeightsTechnique
from optigpu.vocabulary import DeviceKind, UnsupportedError

NEEDED_CAPABILITY = (7, 5)
"""Turing was the first with matrix units for int8."""


class Int8Dynamic(WeightsTechnique):
    """Replaces every linear layer, GPT-2's Conv1D and the tied head by int8 ones that quantize each token's inputs.

    `smoothing`, from 0 to 1, first moves outliers of the activations into the weights (SmoothQuant's alpha, 0.5 in the
    paper); the model writes the text for it by itself. A tied embedding keeps its dtype, as in int8_weight_only.
    """

    abilities = (Ability.OWN_KERNELS,)
    summary = "int8 weights, and int8 activations with one scale for each token, summed in int32"
    citation = (
        "Yao et al., ZeroQuant, 2022, arXiv:2206.01861 (token-wise activations); smoothing: Xiao et al., SmoothQuant, "
        "2022, arXiv:2211.10438"
    )
    expected = (
        Expected("arithmetic", "a quarter of the fp32 bytes of the layers that it replaces"),
        Expected(
            "measured here",
            "GPT-2 decoded on two Zen 4 cores: 4.42x, with torch_compile 6.29x eager fp32",
            "results/README.md",
        ),
        Expected(
            "aim",
            "prompts and batches up to 4x where the CPU or GPU multiplies int8; a larger error than with "
            "weights alone",
        ),
    )
    error_bound = 0.15
    trials = (Trial(), Trial(beside=("bf16",), devices=(DeviceKind.CUDA,)))
    only_when_asked = True  # int8_weight_only decodes as fast with a smaller error

    name: Literal["int8_dynamic"] = "int8_dynamic"
    smoothing: Annotated[float, Field(ge=0, le=1)] | None = None

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """A GPU needs matrix units for int8; every CPU will do."""
        if device is DeviceKind.CPU:
            return None
        return needs_capability(environment, NEEDED_CAPABILITY, "int8 matrix products")

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        return weights.with_bytes(partial(int8_dynamic_bytes, device=device), head=True)

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layers in place.

        Raises UnsupportedError as `checked_places` and `smooth` do, and for more inputs than 32-bit sums allow.
        """
        from optigpu.ops.linear.int8_dynamic import MOST_INNER, int8_dynamic_backend
        from optigpu.surgery.integer_layers import Int8DynamicLinear
        from optigpu.surgery.places import checked_places, exchange, weight_of
        from optigpu.surgery.smoothing import own_text, smooth

        places = checked_places(model, self.name)
        for place in places:
            inner = weight_of(place.layer).shape[1]
            if inner > MOST_INNER:
                raise UnsupportedError(
                    f"{self.name} sums in 32 bits, which hold up to {MOST_INNER} inputs; {place.path} has {inner}. Use "
                    "int8_weight_only instead."
                )
        if self.smoothing is not None:
            notes.record(smoothed_norms=smooth(model, own_text(model), self.smoothing))
        exchange(places, Int8DynamicLinear.of)
        notes.record(int8_layers=len(places), int8_backend=int8_dynamic_backend(model.device))
