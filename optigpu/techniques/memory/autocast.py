from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.models.described import Part, StoredWeights
from optigpu.techniques.base import (
    ON_MODELS,
    CacheOptions,
    Choice,
    Expected,
    Model,
    ModeOptions,
    Notes,
    Phase,
    Technique,
)
from optigpu.vocabulary import DeviceKind


class Autocast(Technique):
    """Runs forward passes under torch.autocast: products in `dtype`, norms and softmax in float32.

    Each request converts the weights at its first token and keeps both until its end. Under inference_mode torch keeps
    none of them, and a compiled step converts by itself: then every token converts all weights.
    """

    phase = Phase.EXECUTION
    tasks = ON_MODELS
    summary = "matrix products in a narrower type than the weights, which stay float32"
    citation = "Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740"
    expected = (
        Expected("arithmetic", "one and a half times fp32's memory"),
        Expected(
            "aim",
            "the speed of half precision, less the time to convert all weights before each request's first "
            "token; slower for short requests, and wherever each token converts the weights",
        ),
    )
    conflicts = dict.fromkeys(
        ("int8_weight_only", "int8_dynamic", "fp8"),
        "its operator computes in the dtype of its inputs, which autocast does not change",
    )
    choices = (Choice.PRECISION,)
    error_bound = 0.1
    only_when_asked = True  # Decoding loses by it

    name: Literal["autocast"] = "autocast"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and self.dtype == "float16":
            return (
                "autocast in float16 needs a GPU, since CPUs compute float16 slowly; set dtype to bfloat16."
            )
        return None

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(autocast=self.dtype)

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """A converted copy of every matrix that is multiplied is kept beside it."""
        multiplied = (each for each in weights.matrices if each.part in (Part.LINEAR, Part.HEAD))
        copies = sum(matrix.count * matrix.elements for matrix in multiplied)
        return weights.but(widened_bytes=2 * copies)

    def modules(self, model: Model, notes: Notes) -> None:
        """Weights require gradients, though none are computed: torch keeps its conversions of such weights alone."""
        for weight in model.parameters():
            weight.requires_grad_(weight.is_floating_point())

    def cache(self, options: CacheOptions) -> CacheOptions:
        """Rotated keys come out in float32 and values in `dtype`; a static cache has to hold both."""
        return options.but(mixed=True)
