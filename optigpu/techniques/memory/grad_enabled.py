from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.techniques.base import ON_MODELS, Choice, Expected, Model, ModeOptions, Notes, Phase, Technique


class GradEnabled(Technique):
    """Leaves gradients on, with weights that require them: what a forward pass does without no_grad.

    Each request keeps all of its activations, and the growing cache keeps each of its earlier states.
    """

    phase = Phase.EXECUTION
    tasks = ON_MODELS
    summary = "gradients left on: every activation of a request is kept until its end"
    citation = "Paszke et al., PyTorch, NeurIPS 2019, arXiv:1912.01703 (automatic differentiation)"
    expected = (
        Expected("arithmetic", "memory grows with the square of the number of tokens"),
        Expected("aim", "slower"),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "static_kv_cache": "a cache that is kept and written in place would keep every earlier request's gradients",
        "torch_compile": "the compiled decode step writes its cache in place, which would keep every gradient",
        **dict.fromkeys(("int8_weight_only", "int8_dynamic", "fp8"), "quantized weights have no gradient"),
    }
    choices = (Choice.AUTOGRAD,)
    cautionary = True

    name: Literal["grad_enabled"] = "grad_enabled"

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(autograd="grad")

    def modules(self, model: Model, notes: Notes) -> None:
        """Weights require gradients, as those of a model that was just read do."""
        weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        for weight in weights:
            weight.requires_grad_(True)
        notes.record(weights_with_gradient=len(weights))
