"""grad_enabled: a cautionary rung that decodes as if it were training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.techniques.base import ON_MODELS, Basis, Choice, Expected, ModeOptions, Notes, Phase, Technique
from optigpu.vocabulary import Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GradEnabled(Technique):
    """Leaves gradients on, with weights that require them: what a forward pass does without no_grad.

    Each request keeps all of its activations, and the growing cache keeps each of its earlier states.
    """

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.EXECUTION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = "gradients left on: every activation of a request is kept until its end"
    citation: ClassVar[str] = (
        "Paszke et al., PyTorch, NeurIPS 2019, arXiv:1912.01703 (automatic differentiation)"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "memory grows with the square of the number of tokens",
        ),
        Expected(
            Basis.AIM,
            "slower",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "static_kv_cache": "a cache that is kept and written in place would keep every earlier request's gradients",
        "torch_compile": "the compiled decode step writes its cache in place, which would keep every gradient",
        **dict.fromkeys(("int8_weight_only", "int8_dynamic", "fp8"), "quantized weights have no gradient"),
    }
    choices: ClassVar[tuple[Choice, ...]] = (Choice.AUTOGRAD,)
    cautionary: ClassVar[bool] = True

    name: Literal["grad_enabled"] = "grad_enabled"

    def execution(self, options: ModeOptions) -> ModeOptions:
        """torch.enable_grad around every forward pass."""
        return options.but(autograd="grad")

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Weights require gradients, as those of a model that was just read do."""
        weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        for weight in weights:
            weight.requires_grad_(True)
        notes.record(weights_with_gradient=len(weights))
